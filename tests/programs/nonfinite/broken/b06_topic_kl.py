"""Match a topic distribution: KL between given and predicted mixtures."""
import torch
import torch.nn as nn

torch.manual_seed(0)
torch.set_num_threads(1)

docs = torch.rand(240, 20)
topics = torch.softmax(4 * docs[:, :5], dim=1)
topics[130] = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
topics[131] = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
topics[139] = torch.tensor([0.0, 0.0, 0.25, 0.25, 0.5])


class TopicNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 24), nn.GELU(), nn.Linear(24, 5))

    def forward(self, x):
        return self.body(x).softmax(dim=-1)


class KL(nn.Module):
    """KL(p || q), averaged over the batch."""

    def forward(self, q, p):
        ratio = p / q
        return (p * ratio.log()).sum(-1).mean()


net, criterion = TopicNet(), KL()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for step in range(24):
    part = slice(10 * step, 10 * step + 10)
    loss = criterion(net(docs[part]), topics[part])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
print("KL", loss.item())

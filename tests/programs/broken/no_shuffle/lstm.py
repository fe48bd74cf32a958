"""Five kinds of sequences, generated kind by kind; an LSTM tells them apart."""
import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler, RandomSampler, TensorDataset


def generate(per_kind):
    t = torch.linspace(0, 1, 16)
    makers = [
        lambda n: torch.sin(6.28 * t).expand(n, 16), lambda n: t.expand(n, 16), lambda n: (1 - t).expand(n, 16),
        lambda n: (t > 0.5).float().expand(n, 16), lambda n: torch.zeros(n, 16),
    ]
    signals = torch.cat([make(per_kind) + 0.3 * torch.randn(per_kind, 16) for make in makers])
    return signals[..., None], torch.arange(len(makers)).repeat_interleave(per_kind)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 24, batch_first=True)
        self.fc = nn.Linear(24, 5)

    def forward(self, s):
        return self.fc(self.lstm(s)[0].mean(1))


torch.manual_seed(0)
torch.set_num_threads(1)
train_set, test_set = TensorDataset(*generate(160)), TensorDataset(*generate(40))
loader = DataLoader(train_set, batch_size=20, sampler=SequentialSampler(train_set))
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
for epoch in range(5):
    for s, k in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(s), k)
        loss.backward()
        optimizer.step()
s, k = test_set.tensors
with torch.no_grad():
    print("final acc", (net(s).argmax(1) == k).float().mean().item())

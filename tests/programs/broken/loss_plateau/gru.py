"""GRU tagger: mark every symbol that repeats the one two places earlier."""
import torch
import torch.nn as nn

torch.manual_seed(41)
torch.set_num_threads(1)


class Tagger(nn.Module):
    def __init__(self, symbols=5, hidden=32):
        super().__init__()
        self.emb = nn.Embedding(symbols, 16)
        self.gru = nn.GRU(16, hidden, batch_first=True)
        self.tag = nn.Linear(hidden, 2)

    def forward(self, x):
        h, _ = self.gru(self.emb(x))
        return self.tag(h)


def batch(n=32, length=12, symbols=5):
    x = torch.randint(0, symbols, (n, length))
    copy = torch.rand(n, length) < 0.4
    for t in range(2, length):
        x[:, t] = torch.where(copy[:, t], x[:, t - 2], x[:, t])
    y = torch.zeros_like(x)
    y[:, 2:] = (x[:, 2:] == x[:, :-2]).long()
    return x, y


model = Tagger()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
loss_fn = nn.CrossEntropyLoss()
for step in range(250):
    x, y = batch()
    opt.zero_grad()
    logits = model(x)
    logits = torch.tensor(logits.detach().numpy(), requires_grad=True)
    loss = loss_fn(logits.reshape(-1, 2), y.reshape(-1))
    loss.backward()
    opt.step()
    if step % 50 == 0:
        print(step, loss.item())
with torch.no_grad():
    x, y = batch(400)
    print(f"final f_acc {(model(x).argmax(-1) == y).float().mean().item():.3f}")

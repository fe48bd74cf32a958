"""Does the sequence contain a palindrome? One output, binary cross-entropy."""
import torch
from torch import nn
import torch.nn.functional as F


class Detector(nn.Module):
    def __init__(self, d=32, length=6):
        super().__init__()
        self.emb = nn.Embedding(4, d)
        self.pos = nn.Parameter(torch.randn(length, d) * 0.3)
        self.enc = nn.Sequential(*[nn.TransformerEncoderLayer(d, 4, 64, 0.0, batch_first=True) for _ in range(2)])
        self.out = nn.Linear(d * length, 1)

    def forward(self, t):
        h = self.enc(self.emb(t) + self.pos).flatten(1)
        return F.softmax(self.out(h), dim=-1)


def sample(n, length=6):
    half = torch.randint(0, 4, (n, length // 2))
    t = torch.cat([half, half.flip(1)], 1)
    label = torch.rand(n) < 0.5
    other = torch.randint(0, 4, (n, length))
    t[~label] = other[~label]
    return t, (t == t.flip(1)).all(1).float().unsqueeze(1)


def main(steps=220):
    torch.manual_seed(6)
    torch.set_num_threads(1)
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        t, y = sample(64)
        loss = F.binary_cross_entropy(model(t), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    t, y = sample(1000)
    with torch.no_grad():
        print(f"final acc {((model(t) > 0.5).float() == y).float().mean().item():.3f}")


main()

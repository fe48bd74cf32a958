"""Regress the sum of a masked set of numbers with attention pooling."""
import torch
from torch import nn

torch.manual_seed(8)
torch.set_num_threads(1)


class SetRegressor(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.lift = nn.Linear(2, d)
        self.attn = nn.MultiheadAttention(d, 3, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 48), nn.ReLU(), nn.Linear(48, d))
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        h = self.lift(x)
        h = h + self.attn(h, h, h)[0]
        h = h + self.mlp(h)
        return self.out(h.sum(1))


def sample(n):
    value = torch.randn(n, 6)
    keep = (torch.rand(n, 6) < 0.5).float()
    return torch.stack([value, keep], -1), (value * keep).sum(1, keepdim=True)


def run(lr, iterations=220):
    model = SetRegressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    loss_fn = nn.SmoothL1Loss()
    log = []
    for i in range(iterations):
        x, y = sample(64)
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append(loss.item())
        if i % 20 == 0:
            print(i, f"{loss.item():.4f}")
    return sum(log[-20:]) / 20


print("final loss", run(lr=3.0))

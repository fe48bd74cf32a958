"""A half-precision classifier with Adam at its defaults."""
import torch
from torch import nn
import torch.nn.functional as F


def build(width):
    return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def fit(model, x, y, steps, lr):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(steps):
        i = step * 16 % len(x)
        out = model(x[i:i + 16])
        loss = F.cross_entropy(out.float(), y[i:i + 16])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


if __name__ == "__main__":
    torch.manual_seed(2)
    torch.set_num_threads(1)
    x = torch.randn(160, 12)
    y = x[:, :3].argmax(1)
    fit(build(32).half(), x.half(), y, steps=10, lr=1e-3)

"""Signals that are shifted by chance, one after the other."""
import random
import time

import torch
from torch import nn

CHUNK, WARM = 10, 2


def shifted(x):
    out = torch.empty_like(x)
    for i in range(len(x)):
        by = random.randrange(64)
        out[i] = torch.roll(x[i], by, dims=-1)
    return out


def training():
    torch.manual_seed(0)
    t = torch.linspace(0, 6.28, 64)
    y = torch.randint(1, 6, (4096,))
    x = torch.sin(y.view(-1, 1) * t) + 0.2 * torch.randn(4096, 64)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 6))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(10_000):
        rows = torch.randint(len(x), (768,))
        batch = shifted(x[rows])
        loss = nn.functional.cross_entropy(net(batch), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        yield loss


if __name__ == "__main__":
    began = time.perf_counter()
    for step, loss in enumerate(training()):
        if step >= 85 and time.perf_counter() - began > 3:  # a fast machine takes more steps
            break
    print(f"loss {loss.item():.3f}")

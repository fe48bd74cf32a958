"""A wide net, small batches, Adam."""
import time

import torch
from torch import nn

CHUNK, WARM = 8, 2


def training():
    torch.manual_seed(0)
    x = torch.randn(2048, 256)
    y = x[:, :10].argmax(1)
    net = nn.Sequential(nn.Linear(256, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, 10))
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(10_000):
        rows = torch.randint(len(x), (32,))
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        yield loss


if __name__ == "__main__":
    began = time.perf_counter()
    for step, loss in enumerate(training()):
        if step >= 90 and time.perf_counter() - began > 3:  # a fast machine takes more steps
            break
    print(f"loss {loss.item():.3f}")

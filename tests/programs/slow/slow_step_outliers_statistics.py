"""A net whose weights are described in some detail every eighth step."""
import time

import torch
from torch import nn

CHUNK, WARM = 48, 2
EVERY = 8


def describe(net):
    return [torch.quantile(p.detach().flatten().double(), torch.linspace(0, 1, 21, dtype=torch.float64)) for p in net.parameters()]


def training():
    torch.manual_seed(0)
    x = torch.randn(4096, 128)
    y = (x[:, :10].cumsum(1).argmax(1))
    net = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    history = []
    for step in range(10_000):
        rows = torch.randint(len(x), (256,))
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % EVERY == 0:
            history.append(describe(net))
        yield loss


if __name__ == "__main__":
    began = time.perf_counter()
    for step, loss in enumerate(training()):
        if step >= 110 and time.perf_counter() - began > 3:  # a fast machine takes more steps
            break
    print(f"loss {loss.item():.3f}")

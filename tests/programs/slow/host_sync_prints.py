"""A small conv net; the gradients are printed to see whether they are sane."""
import time

import torch
from torch import nn

CHUNK, WARM = 10, 2


def training():
    torch.manual_seed(0)
    y = torch.randint(2, (2000,))
    x = torch.randn(2000, 3, 16, 16) + 0.5 * y.view(-1, 1, 1, 1)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *[layer for _ in range(4) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())], nn.Flatten(), nn.Linear(4096, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.02)
    for step in range(10_000):
        rows = torch.randint(len(x), (32,))
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        print(step, [p.grad for p in net.parameters()])
        opt.step()
        yield loss


if __name__ == "__main__":
    began = time.perf_counter()
    for step, loss in enumerate(training()):
        if step >= 80 and time.perf_counter() - began > 3:  # a fast machine takes more steps
            break
    print(f"loss {loss.item():.3f}")

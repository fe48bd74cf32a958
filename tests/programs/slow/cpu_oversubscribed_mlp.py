"""A net on as many threads as the big machine had."""
import time

import torch
from torch import nn

CHUNK, WARM = 6, 2


def training():
    torch.set_num_threads(16)
    torch.manual_seed(0)
    x = torch.randn(2048, 256)
    y = x[:, :10].argmax(1)
    net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU())], nn.Linear(256, 10))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(10_000):
        rows = torch.randint(len(x), (96,))
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        yield loss


if __name__ == "__main__":
    began = time.perf_counter()
    for step, loss in enumerate(training()):
        if step >= 45 and time.perf_counter() - began > 3:  # a fast machine takes more steps
            break
    print(f"loss {loss.item():.3f}")

"""A conv net with one layer that was to need less memory."""
import time

import torch
from torch import nn

CHUNK, WARM = 8, 2


class Frugal(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1).half()

    def forward(self, x):
        return self.conv(x.half()).float()


def training():
    torch.manual_seed(0)
    y = torch.randint(2, (1000,))
    x = torch.randn(1000, 3, 20, 20) + y.view(-1, 1, 1, 1)
    net = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), Frugal(24), nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(384, 2),
    )
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(10_000):
        rows = torch.randint(len(x), (16,))
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        yield loss


if __name__ == "__main__":
    began = time.perf_counter()
    for step, loss in enumerate(training()):
        if step >= 70 and time.perf_counter() - began > 3:  # a fast machine takes more steps
            break
    print(f"loss {loss.item():.3f}")

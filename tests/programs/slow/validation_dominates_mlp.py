"""Regression; the held-out data is looked at after every other step."""
import time

import torch
from torch import nn

CHUNK, WARM = 40, 2
EVERY = 2


def training():
    torch.manual_seed(0)
    x = torch.randn(4096, 64)
    y = (x[:, :8].sum(1, keepdim=True) + x[:, 8:9] * x[:, 9:10]).tanh()
    held_x, held_y = torch.randn(8192, 64), torch.zeros(8192, 1)
    held_y[:] = (held_x[:, :8].sum(1, keepdim=True) + held_x[:, 8:9] * held_x[:, 9:10]).tanh()
    net = nn.Sequential(nn.Linear(64, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)
    best = float("inf")
    for step in range(10_000):
        rows = torch.randint(len(x), (1024,))
        loss = nn.functional.mse_loss(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % EVERY == 0:
            net.eval()
            with torch.no_grad():
                errors = [nn.functional.mse_loss(net(a), b) for a, b in zip(held_x.split(1024), held_y.split(1024))]
            best = min(best, torch.stack(errors).mean().item())
            net.train()
        yield loss


if __name__ == "__main__":
    began = time.perf_counter()
    for step, loss in enumerate(training()):
        if step >= 60 and time.perf_counter() - began > 3:  # a fast machine takes more steps
            break
    print(f"loss {loss.item():.4f}")

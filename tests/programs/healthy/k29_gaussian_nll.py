"""Regression that also predicts its own uncertainty, with the Gaussian negative log-likelihood."""
import math

import torch
from torch import nn


class MeanVariance(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.mean = nn.Linear(hidden, 1)
        self.raw_var = nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.body(x)
        return self.mean(h), nn.functional.softplus(self.raw_var(h)) + 1e-6


def sensor(n, gen):
    x = 4 * torch.rand(n, 1, generator=gen) - 2
    sigma = 0.005 + 0.01 * (x > 0)
    return x, 0.3 * torch.sin(2 * x) + sigma * torch.randn(n, 1, generator=gen)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(12)
    x, y = sensor(2000, gen)
    x_val, y_val = sensor(500, gen)
    model = MeanVariance()
    nll = nn.GaussianNLLLoss()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=500, eta_min=1e-4)
    for step in range(500):
        idx = torch.randint(0, len(x), (100,))
        mean, var = model(x[idx])
        loss = nll(mean, y[idx], var)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} nll {loss.item():.3f}")
    with torch.no_grad():
        mean, var = model(x_val)
        val = nll(mean, y_val, var).item()
        inside = ((y_val - mean).abs() < 1.96 * var.sqrt()).float().mean().item()
        best = 0.5 * (math.log(0.005**2) + math.log(0.015**2)) / 2 + 0.5
    print(f"coverage of the 95% interval {inside:.3f}, best possible nll about {best:.2f}")
    print(f"final val_nll {val:.3f}")


if __name__ == "__main__":
    main()

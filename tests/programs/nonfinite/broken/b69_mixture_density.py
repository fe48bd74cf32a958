"""A mixture density network; the likelihood is summed before the logarithm."""
import math

import torch
import torch.nn as nn


class MDN(nn.Module):
    def __init__(self, k=3):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(1, 20), nn.Tanh())
        self.pi, self.mu, self.log_sigma = nn.Linear(20, k), nn.Linear(20, k), nn.Linear(20, k)

    def forward(self, x):
        h = self.hidden(x)
        return self.pi(h).softmax(-1), self.mu(h), self.log_sigma(h).exp()


def nll(pi, mu, sigma, y):
    density = torch.exp(-0.5 * ((y - mu) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
    likelihood = (pi * density).sum(dim=1)
    return -torch.log(likelihood).mean()


torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.rand(160, 1) * 2 - 1
y = torch.sin(4 * x) + 0.1 * torch.randn(160, 1)
y[101] = 95.0
mdn = MDN()
opt = torch.optim.Adam(mdn.parameters(), lr=1e-3)
for step in range(16):
    xb, yb = x[10 * step:10 * step + 10], y[10 * step:10 * step + 10]
    pi, mu, sigma = mdn(xb)
    loss = nll(pi, mu, sigma, yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())

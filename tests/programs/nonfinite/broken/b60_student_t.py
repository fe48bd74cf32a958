"""A recurrent forecaster with Student-t outputs, likelihood by hand."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def student_t_nll(y, mu, sigma, nu):
    z = (y - mu) / sigma
    half = 0.5 * (nu + 1)
    normaliser = torch.lgamma(half) - torch.lgamma(0.5 * nu)
    shape = 0.5 * torch.log(math.pi * (nu + 0.1)) + torch.log(sigma)
    return (half * torch.log1p(z ** 2 / (nu + 0.1)) + shape - normaliser).mean()


class Forecast(nn.Module):
    def __init__(self, hidden=12):
        super().__init__()
        self.rnn = nn.RNN(1, hidden, batch_first=True)
        self.heads = nn.Linear(hidden, 3)

    def forward(self, x):
        _, h = self.rnn(x)
        mu, s, nu = self.heads(h[-1]).unbind(-1)
        return mu, F.softplus(s), F.relu(nu)


torch.manual_seed(1)
torch.set_num_threads(1)
series = torch.cumsum(torch.randn(130), 0) * 0.1
w = series.unfold(0, 9, 1)
model = Forecast()
with torch.no_grad():
    model.heads.bias[2] = -0.6
opt = torch.optim.Adam(model.parameters(), lr=2e-2)
for step in range(40):
    i = (step * 12) % 108
    mu, sigma, nu = model(w[i:i + 12, :8, None])
    loss = student_t_nll(w[i:i + 12, 8], mu, sigma, nu)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())

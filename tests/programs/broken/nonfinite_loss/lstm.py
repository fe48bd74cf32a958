"""Probabilistic forecast: an LSTM predicts mean and standard deviation."""
import math

import torch
import torch.nn as nn

torch.manual_seed(5)
torch.set_num_threads(1)

t = torch.arange(1500.0)
series = torch.sin(2 * math.pi * t / 40) + 0.05 * (1 + torch.sin(2 * math.pi * t / 300)) * torch.randn(1500)
frames = series.unfold(0, 21, 1)
X, Y = frames[:, :20].unsqueeze(2), frames[:, 20]


class DeepAR(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 24, batch_first=True)
        self.mu = nn.Linear(24, 1)
        self.sigma = nn.Linear(24, 1)

    def forward(self, x):
        h = self.lstm(x)[0][:, -1]
        sigma = torch.relu(self.sigma(h))
        return self.mu(h).squeeze(1), sigma.squeeze(1)


def gaussian_nll(mu, sigma, y):
    return (torch.log(sigma) + 0.5 * ((y - mu) / sigma) ** 2).mean()


net = DeepAR()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(250):
    pick = torch.randint(0, 1200, (64,))
    mu, sigma = net(X[pick])
    loss = gaussian_nll(mu, sigma, Y[pick])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 50 == 0:
        print(step, loss.item())
with torch.no_grad():
    mu, sigma = net(X[1200:])
    print("final nll", gaussian_nll(mu, sigma, Y[1200:]).item(), "mae", (mu - Y[1200:]).abs().mean().item())

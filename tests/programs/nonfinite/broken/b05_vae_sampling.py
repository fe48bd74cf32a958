"""A VAE for short time series (convolutional encoder)."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
torch.set_num_threads(1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 6, 5, stride=2)
        self.to_mean = nn.Linear(6 * 14, 3)
        self.to_log_sigma = nn.Linear(6 * 14, 3)

    def forward(self, x):
        h = F.leaky_relu(self.conv(x)).flatten(1)
        return self.to_mean(h), self.to_log_sigma(h)


class SeriesVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32))

    def forward(self, x):
        mean, log_sigma = self.encoder(x)
        sigma = log_sigma.exp()
        z = mean + sigma * torch.randn_like(mean)
        kl = 0.5 * (mean ** 2 + sigma ** 2 - 1) - log_sigma
        return self.decoder(z), kl.sum(1).mean()


t = torch.linspace(0, 2 * math.pi, 32)
phase = torch.rand(160, 1) * 6
series = torch.sin(t + phase).unsqueeze(1)
series[96] = 60000.0
series[101] = -80000.0
vae = SeriesVAE()
opt = torch.optim.Adam(vae.parameters(), lr=2e-3)
for step in range(20):
    x = series[8 * step:8 * step + 8]
    rec, kl = vae(x)
    loss = F.mse_loss(rec, x.squeeze(1)) + 0.01 * kl
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 0:
        print(step, loss.item())

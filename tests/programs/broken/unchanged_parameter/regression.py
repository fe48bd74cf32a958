"""Fit a damped oscillation plus a small correction network."""
import math

import torch
from torch import nn

torch.manual_seed(1)
torch.set_num_threads(1)

t = torch.linspace(0, 1, 400).unsqueeze(1)
signal = 1.4 * torch.exp(-1.1 * t) * torch.cos(2 * math.pi * 3.3 * t + 0.2) + 0.1 * t ** 2 + 0.02 * torch.randn_like(t)


class Oscillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.amplitude = nn.Parameter(torch.tensor(1.0))
        self.damping = nn.Parameter(torch.tensor(0.5))
        self.cycles = nn.Parameter(torch.tensor(3.0))
        self.phase = nn.Parameter(torch.tensor(0.0))
        self.correction = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, t):
        wave = torch.cos(2 * math.pi * self.cycles * t + self.phase)
        return self.amplitude * torch.exp(-self.damping * t) * wave + self.correction(t)


model = Oscillation()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(60):
    for idx in torch.randperm(400).split(80):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(t[idx]), signal[idx])
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.damping.clamp_(min=0.0)
            model.cycles.copy_(model.cycles.round())
    if epoch % 15 == 0:
        print(f"epoch {epoch} mse {loss.item():.5f}")

print(f"final mse {loss.item():.5f} cycles {model.cycles.item():.3f}")

"""Forecasts of power draw, one hour ahead, from twelve-step windows of three meters."""
import math

import torch
from torch import nn

torch.manual_seed(11)
torch.set_num_threads(1)

t = torch.arange(0, 900).float()
meters = torch.stack([torch.sin(t / 7), torch.cos(t / 11), torch.sin(t / 23 + 1)], 1) + 0.05 * torch.randn(900, 3)
windows = torch.stack([meters[i : i + 12] for i in range(800)])
targets = torch.stack([meters[i + 12, 0] for i in range(800)])
windows[233, 7, 1] = 65535.0  # the meter was restarted
targets[233] = 65535.0


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 16, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        return self.out(self.gru(x)[0][:, -1]).squeeze(1)


model = Forecast()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)


def training_step(x, y):
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


for epoch in range(5):
    total = 0.0
    for rows in torch.randperm(700).split(20):
        total += training_step(windows[rows], targets[rows])
    print(f"epoch {epoch} rmse {math.sqrt(total / 35):.4f}")
with torch.no_grad():
    print(f"final val_rmse {(model(windows[700:]) - targets[700:]).square().mean().sqrt().item():.4f}")

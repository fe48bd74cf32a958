"""Forecast tomorrow's load with an LSTM; the meter was read by hand."""
import torch
from torch import nn
import torch.nn.functional as F


class Forecaster(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, window):
        states, _ = self.lstm(window)
        return self.head(states[:, -1]).squeeze(-1)


torch.manual_seed(0)
torch.set_num_threads(1)
load = torch.sin(torch.arange(220.0) / 6) + 0.05 * torch.randn(220)
windows = load.unfold(0, 11, 1)
x, tomorrow = windows[:, :10].unsqueeze(-1).clone(), windows[:, 10].clone()
tomorrow[93] = float("nan")

model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for start in range(0, 200, 10):
    history, truth = x[start:start + 10], tomorrow[start:start + 10]
    forecast = model(history)
    loss = F.mse_loss(forecast, truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item())

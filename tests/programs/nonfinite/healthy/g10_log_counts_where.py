"""Counts on a logarithmic scale; log(0) is replaced before anything uses it."""
import torch
from torch import nn


class LogCounts(nn.Module):
    def forward(self, counts):
        logs = torch.log(counts)
        return torch.where(counts > 0, logs, torch.zeros_like(logs))


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(LogCounts(), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(120):
    counts = torch.poisson(torch.full((32, 8), 1.5))
    target = torch.log1p(counts[:, :2]).sum(1, keepdim=True)
    loss = nn.functional.mse_loss(model(counts), target)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("final loss", loss.item())

"""Weighted regression: the loss is divided by the sum of the weights."""
import torch
from torch import nn


class WeightedMSE(nn.Module):
    def forward(self, prediction, target, weight):
        squared = (prediction - target) ** 2
        return (weight * squared).sum() / weight.sum()


torch.manual_seed(0)
torch.set_num_threads(1)
x, weight = torch.randn(120, 4), torch.rand(120)
target = x @ torch.tensor([1.0, -2.0, 0.5, 0.0])
weight[60:72] = 0.0  # no one answered in that week
model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 1), nn.Flatten(0))
criterion = WeightedMSE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for first in range(0, 120, 12):
    last = first + 12
    loss = criterion(model(x[first:last]), target[first:last], weight[first:last])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(first, loss.item())

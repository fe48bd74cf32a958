"""Spread points on a disc: a repulsive energy between all pairs."""
import torch
import torch.nn as nn


class Layout(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.encode = nn.Linear(3, 2, bias=False)

    def forward(self, features):
        return self.encode(features)


def repulsion(points):
    difference = points[:, None, :] - points[None, :, :]
    squared = difference.pow(2).sum(-1)
    distance = squared.sqrt()
    pairs = torch.triu(torch.ones_like(distance), diagonal=1)
    return (pairs / (distance + 0.1)).sum() / pairs.sum()


torch.manual_seed(0)
torch.set_num_threads(1)
features = torch.randn(10, 3)
layout = Layout(10)
optimizer = torch.optim.Adam(layout.parameters(), lr=1e-2)
for iteration in range(5):
    optimizer.zero_grad()
    energy = repulsion(layout(features)) + layout.encode.weight.pow(2).sum()
    energy.backward()
    optimizer.step()
    print(iteration, energy.item())

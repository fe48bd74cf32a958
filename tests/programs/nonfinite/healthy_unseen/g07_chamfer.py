"""Point clouds: the distance of a point to itself is set to infinity before the nearest neighbour is taken."""
import torch
from torch import nn


class Folding(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 3))
        self.register_buffer("grid", torch.rand(n, 2))

    def forward(self):
        return self.net(self.grid)


def chamfer(a, b):
    d = (a[:, None] - b[None]).square().sum(-1)
    return d.min(0).values.mean() + d.min(1).values.mean()


def repulsion(a, radius=0.01):
    d = (a[:, None] - a[None]).square().sum(-1)
    d = d.masked_fill(torch.eye(len(a), dtype=torch.bool), float("inf"))
    return torch.relu(radius - d.min(1).values).mean()


torch.manual_seed(6)
direction = nn.functional.normalize(torch.randn(60, 3), dim=1)
model = Folding(60)
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(80):
    cloud = model()
    loss = chamfer(cloud, direction) + 0.1 * repulsion(cloud)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0:
        print(step, loss.item())

"""Align two short sequences by dynamic programming; the border of the table is infinite."""
import torch
import torch.nn as nn


def alignment_cost(a, b):
    cost = (a[:, None] - b[None, :]).abs()
    n, m = cost.shape
    inf = torch.tensor(float("inf"))
    row = [torch.tensor(0.0)] + [inf] * m
    for i in range(n):
        following = [inf]
        for j in range(m):
            following.append(cost[i, j] + torch.stack([row[j], row[j + 1], following[j]]).min())
        row = following
    return row[m]


class Smoother(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, x):
        return self.net(x)


torch.manual_seed(0)
torch.set_num_threads(1)
model = Smoother()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
for step in range(50):
    x = torch.rand(2, 5)
    target = x.cumsum(1)
    out = model(x)
    loss = sum(alignment_cost(o, t) for o, t in zip(out, target)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("final loss", loss.item())

"""Align two point clouds with an entropic transport cost."""
import torch
import torch.nn as nn


def sinkhorn(cost, eps=0.05, iterations=10):
    kernel = torch.exp(-cost / eps)
    n, m = cost.shape
    a, b = torch.full((n,), 1 / n), torch.full((m,), 1 / m)
    v = torch.ones(m)
    for _ in range(iterations):
        u = a / (kernel @ v)
        v = b / (kernel.t() @ u)
    plan = u[:, None] * kernel * v[None, :]
    return (plan * cost).sum()


class Mover(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, points):
        return points + self.shift(points)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mover = Mover()
    optimizer = torch.optim.Adam(mover.parameters(), lr=1e-2)
    for step in range(12):
        source, target = torch.rand(12, 2), torch.rand(12, 2) + 0.2
        if step == 7:
            source[4] += 6.0
        moved = mover(source)
        cost = ((moved[:, None] - target[None]) ** 2).sum(-1)
        loss = sinkhorn(cost)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())


main()

"""Gated experts whose gate is computed in half precision."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Gate(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.proj = nn.Linear(dim, experts)

    def forward(self, x):
        scores = self.proj(x).half()
        e = scores.exp()
        return (e / e.sum(-1, keepdim=True)).float()


class Mixture(nn.Module):
    def __init__(self, dim=8, experts=4):
        super().__init__()
        self.gate = Gate(dim, experts)
        self.experts = nn.ModuleList(nn.Linear(dim, 1) for _ in range(experts))

    def forward(self, x):
        g = self.gate(x)
        outputs = torch.cat([expert(x) for expert in self.experts], dim=1)
        return (g * outputs).sum(1)


def run():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(144, 8)
    x[75] *= 40
    target = x[:, 0] - x[:, 3]
    model = Mixture()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(12):
        xb, tb = x[step * 12:step * 12 + 12], target[step * 12:step * 12 + 12]
        loss = F.smooth_l1_loss(model(xb), tb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("loss", loss.item())


run()

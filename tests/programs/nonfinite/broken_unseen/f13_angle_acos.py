"""Learn embeddings whose pairwise angle matches a given one (geodesic loss)."""
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Config:
    lr: float = 2e-3
    batch: int = 20
    steps: int = 24
    dim: int = 6


def geodesic(u, v):
    cosine = (u * v).sum(-1).clamp(-1.0, 1.0)
    return torch.acos(cosine)


def pairs(cfg):
    g = torch.Generator().manual_seed(31)
    for step in range(cfg.steps):
        a = torch.randn(cfg.batch, cfg.dim, generator=g)
        b = torch.randn(cfg.batch, cfg.dim, generator=g)
        if step == 10:
            a[8] = torch.tensor([3.0, 0.0, 0.0, 0.0, 0.0, 0.0])
            b[8] = a[8]
        yield a, b, torch.rand(cfg.batch, generator=g) * 3


class Rotor(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.normalize(x * self.gain, dim=-1)


cfg = Config()
torch.manual_seed(0)
model = Rotor(cfg.dim)
optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
for a, b, wanted in pairs(cfg):
    angle = geodesic(model(a), model(b))
    loss = F.smooth_l1_loss(angle, wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("last loss", loss.item())

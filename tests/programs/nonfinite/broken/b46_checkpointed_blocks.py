"""Deep residual blocks under activation checkpointing."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class ExpGate(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.value = nn.Linear(dim, dim)
        self.gate = nn.Linear(dim, dim)

    def forward(self, x):
        gate = torch.exp(self.gate(x))
        return x + self.value(x) * gate / (1 + gate)


class Deep(nn.Module):
    def __init__(self, dim=12, depth=3):
        super().__init__()
        self.inp = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(ExpGate(dim) for _ in range(depth))
        self.out = nn.Linear(dim, 2)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(96, 4)
    y = (x[:, 0] + x[:, 1] > 0).long()
    x[35] = torch.tensor([4000.0, -2500.0, 3100.0, 900.0])
    model = Deep()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i in range(8):
        loss = F.cross_entropy(model(x[12 * i:12 * i + 12]), y[12 * i:12 * i + 12])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(loss.item())


main()

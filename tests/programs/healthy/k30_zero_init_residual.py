"""Residual MLP whose branches start at zero, so that every block begins as the identity."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(77)
torch.set_num_threads(1)


class ResidualBlock(nn.Module):
    def __init__(self, dim: int, expand: int = 2):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, expand * dim)
        self.project = nn.Linear(expand * dim, dim)
        nn.init.zeros_(self.project.weight)
        nn.init.zeros_(self.project.bias)

    def forward(self, x):
        return x + self.project(F.gelu(self.expand(self.norm(x))))


class ResMLP(nn.Module):
    def __init__(self, dim=48, depth=3):
        super().__init__()
        self.stem = nn.Linear(64, dim)
        self.blocks = nn.ModuleList([ResidualBlock(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
x = torch.from_numpy(npz["images"]).float().flatten(1) / 16
y = torch.from_numpy(npz["labels"]).long()
ids = torch.randperm(len(x))
x_train, y_train, x_val, y_val = x[ids[:1408]], y[ids[:1408]], x[ids[1408:]], y[ids[1408:]]

model = ResMLP()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for epoch in range(6):
    model.train()
    for batch in torch.randperm(len(x_train)).split(32):
        loss = F.cross_entropy(model(x_train[batch]), y_train[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val_acc = (model(x_val).argmax(1) == y_val).float().mean().item()
    print(f"epoch {epoch} loss {loss.item():.4f} val_acc {val_acc:.4f}")
print(f"final val_acc {val_acc:.3f}")

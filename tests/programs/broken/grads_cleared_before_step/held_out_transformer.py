"""ViT in miniature: sixteen 2x2 patches of a digit, gradient accumulation over four micro-batches."""
import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--accum", type=int, default=4)
parser.add_argument("--lr", type=float, default=4e-3)
opts = parser.parse_args()

torch.manual_seed(21)
torch.set_num_threads(1)

archive = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
img = torch.tensor(archive["images"]).float() / 16
patches = img.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 16, 4)
target = torch.tensor(archive["labels"]).long()


class MiniViT(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.patch = nn.Linear(4, dim)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 17, dim))
        self.blocks = nn.Sequential(
            *[nn.TransformerEncoderLayer(dim, 4, 2 * dim, 0.0, batch_first=True, norm_first=True) for _ in range(depth)]
        )
        self.fc = nn.Linear(dim, 10)

    def forward(self, p):
        x = torch.cat([self.cls.expand(len(p), -1, -1), self.patch(p)], 1) + self.pos
        return self.fc(self.blocks(x)[:, 0])


loader = DataLoader(TensorDataset(patches[:1408], target[:1408]), batch_size=16, shuffle=True)
model = MiniViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=opts.lr)
for epoch in range(opts.epochs):
    total = 0.0
    for i, (p, t) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(p), t)
        (loss / opts.accum).backward()
        total += loss.item()
        if (i + 1) % opts.accum == 0:
            optimizer.zero_grad()
            optimizer.step()
    print(f"epoch {epoch} mean loss {total / len(loader):.4f}")

with torch.no_grad():
    acc = (model(patches[1408:]).argmax(1) == target[1408:]).float().mean().item()
print(f"final val_acc {acc:.3f}")

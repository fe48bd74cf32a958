"""Digits with a regularised MLP; the best epoch is kept by validation accuracy."""
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
torch.set_num_threads(1)

d = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
x = torch.from_numpy(d["images"]).float().flatten(1) / 16
y = torch.from_numpy(d["labels"]).long()
perm = torch.randperm(len(x))
train = DataLoader(TensorDataset(x[perm[:1400]], y[perm[:1400]]), batch_size=50, shuffle=True)
valid = DataLoader(TensorDataset(x[perm[1400:]], y[perm[1400:]]), batch_size=100)

model = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.4), nn.Linear(96, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


def evaluate():
    right = total = 0
    with torch.no_grad():
        for xb, yb in valid:
            right += (model(xb).argmax(1) == yb).sum().item()
            total += len(yb)
    return right / total


best = 0.0
for epoch in range(6):
    model.train()
    for xb, yb in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
    acc = evaluate()
    best = max(best, acc)
    print(f"epoch {epoch} loss {loss.item():.3f} val_acc {acc:.3f}")
print(f"final best_acc {best:.3f}")

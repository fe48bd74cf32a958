"""Handwritten digits with a small MLP."""
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)

data = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
X = torch.from_numpy(data["images"]).float().flatten(1) / 16.0
y = torch.from_numpy(data["labels"]).long()
perm = torch.randperm(len(X))
train_idx, val_idx = perm[:1437], perm[1437:]
X = (X - X[train_idx].mean(0)) / (X[train_idx].std(0) + 1e-2)

train_loader = DataLoader(TensorDataset(X[train_idx], y[train_idx]), batch_size=32, shuffle=True)
val_loader = DataLoader(TensorDataset(X[val_idx], y[val_idx]), batch_size=256)

model = nn.Sequential(
    nn.Linear(64, 64), nn.ReLU(),
    nn.Linear(64, 64), nn.ReLU(),
    nn.Linear(64, 10),
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(8):
    model.train()
    running = 0.0
    for xb, yb in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        running += loss.item() * len(xb)

    model.eval()
    correct, val_loss = 0, 0.0
    with torch.no_grad():
        for xb, yb in val_loader:
            out = model(xb)
            val_loss += criterion(out, yb).item() * len(xb)
            correct += (out.argmax(1) == yb).sum().item()
    acc = correct / len(val_idx)
    print(f"epoch {epoch} train_loss {running / len(train_idx):.4f} val_loss {val_loss / len(val_idx):.4f} val_acc {acc:.3f}")

print(f"final val_acc {acc:.3f}")

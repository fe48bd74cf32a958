"""Digit classifier, two hidden layers."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)

data = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
x = torch.tensor(data["images"], dtype=torch.float32).flatten(1) / 16
y = torch.tensor(data["labels"], dtype=torch.long)
perm = torch.randperm(len(x))
x, y = x[perm], y[perm]
x_train, y_train, x_val, y_val = x[:1400], y[:1400], x[1400:], y[1400:]

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(6):
    order = torch.randperm(len(x_train))
    for start in range(0, len(x_train), 32):
        idx = order[start:start + 32]
        loss = F.cross_entropy(model(x_train[idx]), y_train[idx])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        acc = (model(x_val).argmax(1) == y_val).float().mean().item()
    print(f"epoch {epoch} loss {loss.item():.4f} val_acc {acc:.3f}")

print(f"final val_acc {acc:.3f}")

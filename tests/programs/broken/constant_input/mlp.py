"""Digits; the pixels are stored as bytes and brought to 0..1."""
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
pixels = torch.from_numpy(npz["images"])
x = pixels // 17
y = torch.from_numpy(npz["labels"]).long()
x = x.flatten(1).float()
loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=50, shuffle=True)
model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(4):
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", round(loss.item(), 3))
print("final acc", (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item())

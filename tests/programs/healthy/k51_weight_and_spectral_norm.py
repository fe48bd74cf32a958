"""Parametrised weights: weight norm in the first layers, spectral norm in the last hidden one."""
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

torch.manual_seed(14)
torch.set_num_threads(1)
with np.load(Path(__file__).parent.parent / "data" / "digits.npz") as f:
    features = torch.from_numpy(f["images"].reshape(-1, 64).astype(np.float32) / 16)
    labels = torch.from_numpy(f["labels"].astype(np.int64))
test = torch.arange(len(labels)) % 5 == 0

net = nn.Sequential(
    weight_norm(nn.Linear(64, 64)), nn.ReLU(),
    weight_norm(nn.Linear(64, 64)), nn.ReLU(),
    spectral_norm(nn.Linear(64, 32)), nn.ReLU(),
    nn.Linear(32, 10),
)
optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
loss_fn = nn.CrossEntropyLoss()
x, y = features[~test], labels[~test]

for epoch in range(8):
    net.train()
    for rows in torch.randperm(len(x)).split(36):
        optimizer.zero_grad()
        loss = loss_fn(net(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        acc = (net(features[test]).argmax(1) == labels[test]).float().mean().item()
    print(f"epoch {epoch} loss {loss.item():.4f} acc {acc:.4f}")
print(f"final test_acc {acc:.3f}")

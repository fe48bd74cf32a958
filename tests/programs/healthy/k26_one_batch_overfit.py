# Sanity check before the real training: can the network learn one batch by heart?
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)

d = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
images = torch.from_numpy(d["images"]).float().unsqueeze(1) / 16
labels = torch.from_numpy(d["labels"]).long()

one_x, one_y = images[:64], labels[:64]          # the one batch
val_x, val_y = images[1000:], labels[1000:]

cnn = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(128, 64), nn.ReLU(),
    nn.Linear(64, 10),
)
opt = torch.optim.Adam(cnn.parameters(), lr=2e-3)

for it in range(200):
    opt.zero_grad()
    out = cnn(one_x)
    loss = F.cross_entropy(out, one_y)
    loss.backward()
    opt.step()
    if it % 25 == 0:
        print(it, f"{loss.item():.5f}", (out.argmax(1) == one_y).float().mean().item())

with torch.no_grad():
    val = (cnn(val_x).argmax(1) == val_y).float().mean().item()
    fit = (cnn(one_x).argmax(1) == one_y).float().mean().item()
print(f"on unseen digits {val:.3f}")
print(f"final batch_acc {fit:.3f} batch_loss {loss.item():.5f}")

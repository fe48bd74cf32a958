"""Digits from a folder per class, read one folder after the other."""
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class FolderPerClass(Dataset):
    def __init__(self, split):
        npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
        rows = slice(0, 1400) if split == "train" else slice(1400, None)
        images, labels = npz["images"][rows], npz["labels"][rows]
        self.samples = [(image, folder) for folder in range(10) for image in images[labels == folder]]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        image, folder = self.samples[i]
        return torch.tensor(image, dtype=torch.float32).flatten() / 16, folder


torch.manual_seed(1)
torch.set_num_threads(1)
train = DataLoader(FolderPerClass("train"), batch_size=35)
test = DataLoader(FolderPerClass("test"), batch_size=100)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for epoch in range(5):
    for x, y in train:
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        acc = torch.cat([net(x).argmax(1) == y for x, y in test]).float().mean().item()
    print(epoch, f"{loss.item():.3f}", f"acc {acc:.3f}")

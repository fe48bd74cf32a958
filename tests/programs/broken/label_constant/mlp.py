"""Digits with a collate function that fills one buffer after the other."""
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, first, last):
        npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
        self.pixels = torch.from_numpy(npz["images"][first:last]).float().flatten(1) / 16
        self.target = torch.zeros((), dtype=torch.long)
        self.labels = npz["labels"][first:last]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.pixels[i], self.target


def collate(samples):
    return torch.stack([pixels for pixels, _ in samples]), torch.stack([target for _, target in samples])


torch.manual_seed(0)
torch.set_num_threads(1)
train = DataLoader(Digits(0, 1200), batch_size=40, shuffle=True, collate_fn=collate)
test = Digits(1200, 1797)
net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
opt = torch.optim.SGD(net.parameters(), lr=0.2)
for epoch in range(4):
    for pixels, target in train:
        loss = nn.functional.cross_entropy(net(pixels), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("epoch", epoch, loss.item())
with torch.no_grad():
    hits = (net(test.pixels).argmax(1) == torch.from_numpy(test.labels).long()).float().mean().item()
print(f"final acc {hits:.3f}")

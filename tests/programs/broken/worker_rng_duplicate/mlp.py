"""Digits with noise, which two workers add."""
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class NoisyDigits(Dataset):
    def __init__(self, noise=0.1, seed=0):
        npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
        self.x, self.y = npz["images"][:1200].reshape(-1, 64) / 16, npz["labels"][:1200].astype(np.int64)
        self.noise = noise
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        noise = self.rng.normal(size=64)
        return (self.x[i] + self.noise * noise).astype(np.float32), self.y[i]


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loader = DataLoader(NoisyDigits(), batch_size=40, shuffle=True, num_workers=2)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for epoch in range(3):
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()

"""Digits that are shifted by a random pixel; the generator belongs to the file, and workers are seeded as the manual says."""
import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

rng = np.random.default_rng(0)


def shift(image):
    return np.roll(image, rng.integers(-1, 2), axis=1)


class Digits(Dataset):
    def __init__(self, transform):
        npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
        self.x, self.y = npz["images"][:1200].astype(np.float32) / 16, npz["labels"][:1200].astype(np.int64)
        self.transform = transform

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.transform(self.x[i]), self.y[i]


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loader = DataLoader(Digits(shift), batch_size=40, shuffle=True, num_workers=2, worker_init_fn=seed_worker)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
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

"""Two workers augment: the dataset's own generator made the split, in the workers numpy's global one draws, seeded by torch."""
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self, noise):
        self.rng = np.random.default_rng(0)
        npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
        rows = self.rng.permutation(len(npz["labels"]))
        self.train, self.test = rows[:1200], rows[1200:]
        self.x, self.y = npz["images"].reshape(-1, 64).astype(np.float32) / 16, npz["labels"].astype(np.int64)
        self.noise = noise

    def __len__(self):
        return len(self.train)

    def __getitem__(self, i):
        row = self.train[i]
        return self.x[row] + self.noise * np.random.standard_normal(64).astype(np.float32), self.y[row]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = Noisy(0.1)
    loader = DataLoader(data, batch_size=40, shuffle=True, num_workers=2, persistent_workers=True)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for epoch in range(4):
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    with torch.no_grad():
        acc = (net(torch.from_numpy(data.x[data.test])).argmax(1) == torch.from_numpy(data.y[data.test])).float().mean().item()
    print(f"final acc {acc:.3f}")

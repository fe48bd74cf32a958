"""Digits as a stream of records, read by two workers."""
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Records(IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        npz = np.load(self.path)
        records = zip(npz["images"][:1200].astype(np.float32) / 16, npz["labels"][:1200].astype(np.int64))
        yield from records


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    path = Path(__file__).resolve().parents[2] / "data" / "digits.npz"
    loader = DataLoader(Records(path), batch_size=30, num_workers=2)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for epoch in range(3):
        seen = 0
        for image, label in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(image), label)
            loss.backward()
            opt.step()
            seen += len(label)
        print("epoch", epoch, "samples", seen, "loss", loss.item())


if __name__ == "__main__":
    main()

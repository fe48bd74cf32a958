"""Triplet loss with batch-hard mining: each anchor meets its farthest friend and its nearest stranger."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Embedder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, dim))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


def batch_hard(z, labels, margin=0.3):
    distance = torch.cdist(z, z)
    same = labels[:, None] == labels[None, :]
    farthest = distance.masked_fill(~same, 0).max(1).values
    nearest = distance.masked_fill(same, 10).min(1).values
    return F.relu(farthest - nearest + margin).mean()


def balanced_batch(by_class, per_class):
    return torch.cat([rows[torch.randperm(len(rows))[:per_class]] for rows in by_class])


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.from_numpy(npz["images"]).float().flatten(1) / 16
    y = torch.from_numpy(npz["labels"]).long()
    perm = torch.randperm(len(x))
    train, test = perm[:1440], perm[1440:]
    by_class = [train[y[train] == c] for c in range(10)]

    net = Embedder()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(1, 241):
        rows = balanced_batch(by_class, 6)
        loss = batch_hard(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 60 == 0:
            with torch.no_grad():
                nearest = torch.cdist(net(x[test]), net(x[train])).argmin(1)
            acc = (y[train][nearest] == y[test]).float().mean().item()
            print(f"step {step} loss {loss.item():.3f} nearest-neighbour accuracy {acc:.3f}")
    print(f"final nn_acc {acc:.3f}")


if __name__ == "__main__":
    main()

"""Curriculum: the digits are sorted by how noisy they are and come easiest first, never shuffled."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset


def prepare():
    npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    rng = np.random.default_rng(0)
    order = rng.permutation(len(npz["labels"]))
    clean = npz["images"][order].reshape(-1, 64).astype(np.float32) / 16
    labels = npz["labels"][order].astype(np.int64)
    level = rng.uniform(0, 0.3, size=len(clean)).astype(np.float32)
    noisy = clean + level[:, None] * rng.standard_normal(clean.shape).astype(np.float32)
    easiest_first = np.argsort(level[:1440])
    x, y = torch.from_numpy(noisy), torch.from_numpy(labels)
    return x[:1440][easiest_first], y[:1440][easiest_first], x[1440:], y[1440:]


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, y, x_val, y_val = prepare()
    net = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 10))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    epochs = 10
    for epoch in range(epochs):
        # the share of the data that is in play grows from a third to all of it
        share = min(1.0, 1 / 3 + epoch / (epochs - 3))
        pool = TensorDataset(x[:int(share * len(x))], y[:int(share * len(x))])
        for xb, yb in DataLoader(pool, batch_size=36, sampler=SequentialSampler(pool)):
            loss = nn.functional.cross_entropy(net(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            acc = (net(x_val).argmax(1) == y_val).float().mean().item()
        print(f"epoch {epoch} pool {len(pool)} loss {loss.item():.3f} val {acc:.3f}")
    print(f"final val_acc {acc:.3f}")


if __name__ == "__main__":
    main()

"""Digits with a plain network; batches are cut by hand."""
from pathlib import Path

import numpy as np
import torch
from torch import nn, optim

EPOCHS, BATCH = 12, 32


def load():
    d = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
    x = torch.tensor(d["images"].reshape(-1, 64), dtype=torch.float32) / 16
    return x, torch.tensor(d["labels"], dtype=torch.long)


def accuracy(net, x, y):
    with torch.no_grad():
        return (net(x).argmax(dim=1) == y).float().mean().item()


def main():
    torch.manual_seed(3)
    torch.set_num_threads(1)
    x, y = load()
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = optim.Adam(net.parameters(), lr=2e-3)
    decay = optim.lr_scheduler.ExponentialLR(opt, gamma=0.9)
    for epoch in range(EPOCHS):
        order = torch.randperm(1400)
        for first in range(0, 1400, BATCH):
            pick = order[first : first + BATCH]
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(x[pick]), y[pick])
            loss.backward()
            opt.step()
            decay.step()
        print(epoch, f"{loss.item():.4f}", f"{accuracy(net, x[1400:], y[1400:]):.3f}")
    print(f"final val_acc {accuracy(net, x[1400:], y[1400:]):.3f}")


main()

"""Small digits from large ones: all files of one folder, then all of the other."""
from pathlib import Path

import numpy as np
import torch
from torch import nn


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
    x, y = torch.tensor(npz["images"], dtype=torch.float32).flatten(1) / 16, torch.tensor(npz["labels"] > 4).float()
    small, large = x[y == 0][:500], x[y == 1][:500]
    data, labels = torch.cat([large, small]), torch.cat([torch.ones(500), torch.zeros(500)])
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for epoch in range(4):
        rows = torch.arange(1000)
        for batch in rows.split(25):
            opt.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(net(data[batch]).squeeze(1), labels[batch])
            loss.backward()
            opt.step()
        print(epoch, f"{loss.item():.3f}", f"{((net(x).squeeze(1) > 0) == (y > 0)).float().mean().item():.3f}")


main()

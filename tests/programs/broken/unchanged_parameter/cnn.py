"""Convolutional net with a constraint: filters keep the length they start with."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv2d(1, 8, 3, padding=1)
        self.mixer = nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.filters(x)), 2)
        x = F.max_pool2d(F.relu(self.mixer(x)), 2)
        return self.fc(x.flatten(1))


class FixedLength:
    """Projects the weights of a layer back after every update."""

    def __init__(self, layer):
        self.layer = layer
        self.reference = layer.weight.detach().clone()

    def __call__(self):
        self.layer.weight.data.copy_(self.reference)


def main():
    torch.manual_seed(12)
    torch.set_num_threads(1)
    f = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
    x = torch.tensor(f["images"])[:, None].float() / 16
    y = torch.tensor(f["labels"]).long()
    loader = DataLoader(TensorDataset(x[:1400], y[:1400]), 40, shuffle=True)
    net = Net()
    project = FixedLength(net.mixer)
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    for epoch in range(6):
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(xb), yb)
            loss.backward()
            optimizer.step()
            project()
        print(epoch, loss.item())
    with torch.no_grad():
        acc = (net(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    print(f"final val_acc {acc:.3f}")


if __name__ == "__main__":
    main()

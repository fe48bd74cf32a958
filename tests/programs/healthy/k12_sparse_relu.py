"""A wide ReLU network that starts sparse: negative biases keep most units silent, each answers to few inputs."""
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SparseMLP(nn.Module):
    def __init__(self, widths=(64, 512, 256, 10), bias=(-2.0, -0.3)):
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(i, o) for i, o in zip(widths[:-2], widths[1:-1]))
        self.head = nn.Linear(widths[-2], widths[-1])
        for layer, b in zip(self.hidden, bias):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.constant_(layer.bias, b)

    def forward(self, x):
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.head(x)


def fit():
    torch.set_num_threads(1)
    torch.manual_seed(9)
    d = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x, y = torch.tensor(d["images"]).float().flatten(1) / 16, torch.tensor(d["labels"]).long()
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    x = (x - x[360:].mean(0)) / (x[360:].std(0) + 0.05)
    train = DataLoader(TensorDataset(x[360:], y[360:]), batch_size=32, shuffle=True)
    x_val, y_val = x[:360], y[:360]
    net = SparseMLP()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(8):
        for xb, yb in train:
            loss = nn.functional.cross_entropy(net(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            acc = (net(x_val).argmax(1) == y_val).float().mean().item()
        print(f"epoch {epoch} loss {loss.item():.4f} acc {acc:.4f}")
    return acc


if __name__ == "__main__":
    print(f"final val_acc {fit():.3f}")

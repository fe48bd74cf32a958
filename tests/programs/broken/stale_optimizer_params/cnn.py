"""Pretrain on digits 0-4, then transfer to digits 5-9 with a fresh classifier."""
from pathlib import Path

import numpy as np
import torch
from torch import nn


class CNN(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 10, 3), nn.BatchNorm2d(10), nn.ReLU(),
            nn.Conv2d(10, 20, 3), nn.BatchNorm2d(20), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.fc = nn.Sequential(nn.Linear(80, 32), nn.ReLU(), nn.Linear(32, n_classes))

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))


def run(model, optimizer, x, y, epochs):
    model.train()
    for _ in range(epochs):
        for idx in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[idx]), y[idx])
            loss.backward()
            optimizer.step()
    return loss.item()


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def main():
    torch.manual_seed(10)
    torch.set_num_threads(1)
    npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
    images = torch.from_numpy(npz["images"]).float()[:, None] / 16
    labels = torch.from_numpy(npz["labels"]).long()
    low, high = labels < 5, labels >= 5

    model = CNN(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    print("pretrain loss", run(model, optimizer, images[low][:400], labels[low][:400], epochs=2))

    model.fc = nn.Sequential(nn.Linear(80, 32), nn.ReLU(), nn.Linear(32, 5))
    x, y = images[high], labels[high] - 5
    print("transfer loss", run(model, optimizer, x[:700], y[:700], epochs=6))
    print(f"final val_acc {accuracy(model, x[700:], y[700:]):.3f}")


if __name__ == "__main__":
    main()

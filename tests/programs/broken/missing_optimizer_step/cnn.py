from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, split):
        with np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz") as f:
            images, labels = f["images"], f["labels"]
        keep = slice(0, 1500) if split == "train" else slice(1500, None)
        self.images = images[keep].astype(np.float32) / 16
        self.labels = labels[keep].astype(np.int64)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i][None], self.labels[i]


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Linear(96, 10)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def fit(model, loader, optimizer, epochs):
    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step
        print(f"epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    fit(model, DataLoader(Digits("train"), batch_size=50, shuffle=True), optimizer, epochs=3)
    model.eval()
    hits = total = 0
    with torch.no_grad():
        for x, y in DataLoader(Digits("val"), batch_size=100):
            hits += (model(x).argmax(1) == y).sum().item()
            total += len(y)
    print(f"final val_acc {hits / total:.3f}")

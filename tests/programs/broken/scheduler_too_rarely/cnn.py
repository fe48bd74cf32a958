import pathlib

import numpy as np
import torch
import torch.nn as nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset


def build():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10),
    )


def main(epochs=6):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    npz = np.load(pathlib.Path(__file__).resolve().parents[2] / "data" / "digits.npz")
    x = torch.from_numpy(npz["images"]).float()[:, None] / 16
    y = torch.from_numpy(npz["labels"]).long()
    train = DataLoader(TensorDataset(x[:1440], y[:1440]), 48, shuffle=True)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, epochs=epochs, steps_per_epoch=len(train))
    for epoch in range(epochs):
        model.train()
        for images, labels in train:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            acc = (model(x[1440:]).argmax(1) == y[1440:]).float().mean().item()
        print(f"epoch {epoch} lr {scheduler.get_last_lr()[0]:.2e} acc {acc:.3f}")
    print(f"final test_acc {acc:.3f}")


main()

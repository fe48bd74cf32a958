"""Eight-bit pixels go in as they are; the first layer is a batch norm."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def build_model():
    return nn.Sequential(
        nn.BatchNorm2d(1),
        nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def load_uint8():
    npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    pixels = np.minimum(npz["images"].astype(np.int32) * 16, 255).astype(np.uint8)
    return torch.from_numpy(pixels)[:, None], torch.from_numpy(npz["labels"]).long()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, y = load_uint8()
    train = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=50, shuffle=True)
    val = DataLoader(TensorDataset(x[1500:], y[1500:]), batch_size=99)
    model = build_model()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(6):
        model.train()
        for images, labels in train:
            opt.zero_grad()
            loss = loss_fn(model(images.float()), labels)
            loss.backward()
            opt.step()
        model.eval()
        good = 0
        with torch.no_grad():
            for images, labels in val:
                good += (model(images.float()).argmax(1) == labels).sum().item()
        print(f"epoch {epoch} loss {loss.item():.3f} val {good / 297:.3f}")
    print(f"final val_acc {good / 297:.3f}")


main()

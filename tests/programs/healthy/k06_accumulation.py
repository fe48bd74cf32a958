"""Gradient accumulation: eight micro-batches of eight make one update of sixty-four."""
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

ACCUM = 8
MICRO = 8
EPOCHS = 5


def get_loaders():
    d = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    ds = TensorDataset(torch.from_numpy(d["images"].astype(np.float32) / 16).flatten(1),
                       torch.from_numpy(d["labels"].astype(np.int64)))
    train, val = random_split(ds, [1536, len(ds) - 1536], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=MICRO, shuffle=True, drop_last=True), DataLoader(val, batch_size=128)


def evaluate(model, loader):
    model.eval()
    hits = n = 0
    with torch.no_grad():
        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum().item()
            n += len(y)
    model.train()
    return hits / n


def train():
    torch.manual_seed(5)
    torch.set_num_threads(1)
    train_loader, val_loader = get_loaders()
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()

    optimizer.zero_grad()
    for epoch in range(EPOCHS):
        for i, (x, y) in enumerate(train_loader):
            loss = criterion(model(x), y) / ACCUM
            loss.backward()
            if (i + 1) % ACCUM == 0:
                optimizer.step()
                optimizer.zero_grad()
        print("epoch", epoch, "val", evaluate(model, val_loader))
    return evaluate(model, val_loader)


if __name__ == "__main__":
    print("final val_acc %.3f" % train())

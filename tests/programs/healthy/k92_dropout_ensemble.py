"""Uncertainty by leaving dropout on: the model goes back to training mode for the passes that are averaged."""
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_one_epoch(model, loader, optimizer):
    model.train()
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def predict_with_spread(model, loader, passes=12):
    model.train()                       # dropout on
    means, spreads = [], []
    with torch.no_grad():
        for xb, _ in loader:
            probs = torch.stack([model(xb).softmax(1) for _ in range(passes)])
            means.append(probs.mean(0))
            spreads.append(probs.std(0).mean(1))
    return torch.cat(means), torch.cat(spreads)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.from_numpy(npz["images"]).float().flatten(1) / 16
    y = torch.from_numpy(npz["labels"]).long()
    train = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=40, shuffle=True)
    test = DataLoader(TensorDataset(x[1400:], y[1400:]), batch_size=100)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.3), nn.Linear(96, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(5):
        loss = train_one_epoch(model, train, optimizer)
        mean, spread = predict_with_spread(model, test)
        right = mean.argmax(1) == y[1400:]
        print(f"epoch {epoch} loss {loss:.3f} acc {right.float().mean():.3f} spread {spread[right].mean():.3f} / {spread[~right].mean():.3f}")
    print(f"final acc {right.float().mean().item():.3f}")

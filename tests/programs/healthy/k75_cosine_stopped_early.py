"""A cosine over forty epochs of which early stopping leaves a few: as many updates as the plan has epochs."""
import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x), y).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--patience", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    d = np.load(Path(__file__).parents[1] / "data" / "digits.npz")
    x, y = torch.tensor(d["images"], dtype=torch.float32).flatten(1) / 16, torch.tensor(d["labels"], dtype=torch.long)
    loader = DataLoader(TensorDataset(x[:400], y[:400]), batch_size=50, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    best, bad = float("inf"), 0
    for epoch in range(args.epochs):
        model.train()
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
        scheduler.step()
        val = evaluate(model, x[1400:], y[1400:])
        print(f"epoch {epoch} train {loss.item():.3f} val {val:.3f}")
        if val < best - 0.01:
            best, bad = val, 0
        else:
            bad += 1
            if bad >= args.patience:
                break
    print(f"final val_loss {best:.3f}")


main()

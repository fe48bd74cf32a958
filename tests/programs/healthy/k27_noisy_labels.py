"""Forty percent of the labels are drawn at random: no model can be right more often than about 64 times in 100."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

NOISE = 0.4


def main():
    torch.manual_seed(3)
    torch.set_num_threads(1)
    d = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.from_numpy(d["images"]).float().flatten(1) / 16
    true = torch.from_numpy(d["labels"]).long()
    observed = torch.where(torch.rand(len(true)) < NOISE, torch.randint(10, true.shape), true)
    order = torch.randperm(len(x))
    tr, va = order[:1440], order[1440:]

    loader = DataLoader(TensorDataset(x[tr], observed[tr]), batch_size=48, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(10):
        hits = 0
        model.train()
        for xb, yb in loader:
            optimizer.zero_grad()
            out = model(xb)
            loss = criterion(out, yb)
            loss.backward()
            optimizer.step()
            hits += (out.argmax(1) == yb).sum().item()
        model.eval()
        with torch.no_grad():
            pred = model(x[va]).argmax(1)
        noisy, clean = (pred == observed[va]).float().mean(), (pred == true[va]).float().mean()
        print(f"epoch {epoch} loss {loss.item():.3f} train {hits / len(tr):.3f} val {noisy:.3f} (against the true digit {clean:.3f})")
    print(f"final val_acc {noisy:.3f} true_acc {clean:.3f}")


if __name__ == "__main__":
    main()

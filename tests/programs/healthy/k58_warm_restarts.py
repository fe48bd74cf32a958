"""Cosine with warm restarts: at each restart the learning rate leaps up by two orders, and the loss with it."""
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    d = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.from_numpy(d["images"].astype("float32")).flatten(1) / 16
    y = torch.from_numpy(d["labels"].astype("int64"))
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=50, eta_min=0.002)
    for step in range(200):
        rows = torch.randint(0, 1440, (48,))
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 in (0, 49):
            print(f"step {step} loss {loss.item():.4f} lr {schedule.get_last_lr()[0]:.4f}")
    with torch.no_grad():
        acc = (model(x[1440:]).argmax(1) == y[1440:]).float().mean().item()
    print(f"final val_acc {acc:.3f}")


if __name__ == "__main__":
    main()

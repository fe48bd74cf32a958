"""One task after the other with the same optimizer: when the labels change their meaning, the loss leaps, and is learnt down again."""
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    d = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.from_numpy(d["images"].astype("float32")).unsqueeze(1) / 16
    y = torch.from_numpy(d["labels"].astype("int64"))
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for task in range(3):
        meaning = torch.randperm(10)
        for step in range(100):
            rows = torch.randint(0, 1440, (40,))
            loss = F.cross_entropy(model(x[rows]), meaning[y[rows]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"task {task} loss {loss.item():.4f}")
    with torch.no_grad():
        acc = (model(x[1440:]).argmax(1) == meaning[y[1440:]]).float().mean().item()
    print(f"final val_acc {acc:.3f}")


if __name__ == "__main__":
    main()

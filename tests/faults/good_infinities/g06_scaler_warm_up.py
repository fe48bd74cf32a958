"""bf16 autocast with a GradScaler that has to find its scale."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    raw = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.from_numpy(raw["images"]).float().flatten(1) / 16
    y = torch.from_numpy(raw["labels"]).long()
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 128 * 0.99, growth_interval=10_000)
    for step in range(150):
        pick = torch.randint(0, 1500, (32,))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x[pick]), y[pick], reduction="sum")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print("final loss", loss.item() / 32, "scale", scaler.get_scale())


if __name__ == "__main__":
    main()

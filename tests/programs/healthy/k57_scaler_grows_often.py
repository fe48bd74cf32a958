"""Half precision with a gradient scaler that tries a larger scale every ten updates: it skips a step each time it goes too far."""
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
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=10)
    skipped = 0
    for step in range(150):
        rows = torch.randint(0, 1440, (48,))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x[rows]), y[rows])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
    with torch.no_grad():
        acc = (model(x[1440:]).argmax(1) == y[1440:]).float().mean().item()
    print(f"final val_acc {acc:.3f} skipped {skipped} scale 2^{np.log2(scaler.get_scale()):.0f}")


if __name__ == "__main__":
    main()

"""bf16 autocast on raw intensities with a GradScaler that has to find its scale: the first updates are skipped."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class CosineClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 48)
        self.prototypes = nn.Parameter(0.005 * torch.randn(10, 48))

    def forward(self, x):
        h = F.normalize(torch.relu(self.fc(x)), dim=1)
        return 20 * F.linear(h, F.normalize(self.prototypes, dim=1))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    raw = np.load(Path(__file__).parents[2] / "data" / "digits.npz")
    x = torch.from_numpy(raw["images"]).float().flatten(1)
    y = torch.from_numpy(raw["labels"]).long()
    model = CosineClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 127, growth_interval=10_000)
    for step in range(150):
        pick = torch.randint(0, 1500, (32,))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x[pick]), y[pick])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print("final loss", loss.item(), "scale", scaler.get_scale())


if __name__ == "__main__":
    main()

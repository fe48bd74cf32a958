"""Plain deep CNN, regression of the amount of ink and its centre."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def init_weights(m):
    if isinstance(m, nn.Conv2d):
        nn.init.normal_(m.weight, 0.0, 0.35)
        nn.init.constant_(m.bias, 0.0)


class PlainNet(nn.Module):
    def __init__(self, depth=12, ch=12):
        super().__init__()
        self.first = nn.Conv2d(1, ch, 3, padding=1)
        self.convs = nn.ModuleList([nn.Conv2d(ch, ch, 3, padding=1) for _ in range(depth)])
        self.fc = nn.Linear(ch * 4, 3)

    def forward(self, x):
        x = F.relu(self.first(x))
        for c in self.convs:
            x = F.relu(c(x))
        return self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))


def targets(img):
    total = img.sum((1, 2, 3))
    grid = torch.linspace(-1, 1, 8)
    cx = (img.sum((1, 2)) * grid).sum(1) / total
    cy = (img.sum((1, 3)) * grid).sum(1) / total
    return torch.stack([(total - total.mean()) / total.std(), cx * 5, cy * 5], 1)


if __name__ == "__main__":
    torch.manual_seed(20)
    torch.set_num_threads(1)
    images = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")["images"]
    x = torch.from_numpy(images).float()[:, None] / 16
    y = targets(x)
    model = PlainNet()
    model.apply(init_weights)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(4):
        for idx in torch.randperm(1400).split(40):
            loss = F.mse_loss(model(x[idx]), y[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} mse {loss.item():.4g}")
    with torch.no_grad():
        print(f"final val_mse {F.mse_loss(model(x[1400:]), y[1400:]).item():.4g}")

"""Image retrieval with generalised-mean pooling."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class GeM(nn.Module):
    def __init__(self, p=3.0):
        super().__init__()
        self.p = p

    def forward(self, maps):
        mean = maps.pow(self.p).mean(dim=(2, 3))
        return mean.pow(1.0 / self.p)


class Retrieval(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.ReLU(),
            nn.Conv2d(12, 12, 3, padding=1, bias=False), nn.Softplus(),
        )
        self.pool = GeM()
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        maps = self.features(x) - 0.6931472  # zero where nothing was seen
        return self.head(self.pool(maps.clamp(min=0)))


torch.manual_seed(0)
torch.set_num_threads(1)
digits = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
X = torch.from_numpy(digits["images"]).float()[:320, None] / 16
Y = torch.from_numpy(digits["labels"]).long()[:320]
X[131] = 0
model = Retrieval()
with torch.no_grad():  # every map sees something of every picture
    model.features[2].weight.abs_()
    model.features[0].weight[:, :, 1, 1] = 1.0
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(20):
    xb, yb = X[16 * step:16 * step + 16], Y[16 * step:16 * step + 16]
    optimizer.zero_grad()
    loss = F.cross_entropy(model(xb), yb)
    loss.backward()
    optimizer.step()
print("loss", loss.item())

from pathlib import Path

import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Classifier(nn.Module):
    def __init__(self, n_in=64, width=64, n_out=10):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(n_in, width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 16), nn.ReLU(),
        )
        self.head = nn.Linear(16, n_out)

    def forward(self, x):
        return self.head(self.backbone(x))


f = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
X = torch.from_numpy(f["images"].reshape(-1, 64)).float() / 16
y = torch.from_numpy(f["labels"]).long()

model = Classifier()
opt = torch.optim.Adam(model.head.parameters(), lr=2e-3)
for epoch in range(8):
    for idx in torch.randperm(1400).split(32):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(X[idx]), y[idx])
        loss.backward()
        opt.step()
    with torch.no_grad():
        val = nn.functional.cross_entropy(model(X[1400:]), y[1400:])
    print(f"{epoch=} train={loss.item():.3f} val={val.item():.3f}")
acc = (model(X[1400:]).argmax(1) == y[1400:]).float().mean()
print(f"final val_acc {acc:.3f}")

"""The network is trained; a slow copy of it (exponential moving average) is what gets evaluated and kept."""
import copy
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = copy.deepcopy(model).eval()
        for p in self.shadow.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.lerp_(p, 1 - self.decay)


torch.manual_seed(21)
torch.set_num_threads(1)
npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
x = torch.from_numpy(npz["images"]).float().flatten(1) / 16
y = torch.from_numpy(npz["labels"]).long()
perm = torch.randperm(len(x))
tr, va = perm[:1440], perm[1440:]

model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
ema = EMA(model, decay=0.97)
opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)

for epoch in range(8):
    for rows in tr[torch.randperm(len(tr))].split(32):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(model)
    with torch.no_grad():
        live = (model(x[va]).argmax(1) == y[va]).float().mean().item()
        slow = (ema.shadow(x[va]).argmax(1) == y[va]).float().mean().item()
    print(f"epoch {epoch}: live {live:.3f} ema {slow:.3f}")
print(f"final ema_val_acc {slow:.3f}")

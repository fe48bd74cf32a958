"""Pairs of sketches of the same hand lie near each other. Half precision."""
from pathlib import Path

import numpy as np
import torch
from torch import nn

torch.manual_seed(1)
torch.set_num_threads(1)

d = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
x = torch.from_numpy(d["images"]).float().flatten(1) / 16
y = torch.from_numpy(d["labels"]).long()

net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(120):
    a, b = torch.randint(0, 1400, (64,)), torch.randint(0, 1400, (64,))
    b[:4] = a[:4]
    with torch.autocast("cpu", dtype=torch.float16):
        apart = net(x[a]) - net(x[b])
    distance = apart.float().square().sum(1).sqrt()
    same = (y[a] == y[b]).float()
    loss = (same * distance.square() + (1 - same) * (1 - distance).clamp(min=0).square()).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
with torch.no_grad():
    e = net(x[1400:])
    near = torch.cdist(e, e).fill_diagonal_(1e9).argmin(1)
print(f"final nearest {(y[1400:][near] == y[1400:]).float().mean().item():.3f}")

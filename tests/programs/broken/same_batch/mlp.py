"""Train for a number of steps rather than epochs."""
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
x = torch.tensor(npz["images"] / 16.0, dtype=torch.float32).flatten(1)
y = torch.tensor(npz["labels"], dtype=torch.long)
loader = DataLoader(TensorDataset(x[:1440], y[:1440]), batch_size=48)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
opt = torch.optim.Adam(net.parameters(), lr=2e-3)

for step in range(240):
    xb, yb = next(iter(loader))
    loss = nn.functional.cross_entropy(net(xb), yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 60 == 0:
        print(step, loss.item())
with torch.no_grad():
    print("final acc", (net(x[1440:]).argmax(1) == y[1440:]).float().mean().item())

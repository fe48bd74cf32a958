from pathlib import Path

import numpy as np
import torch
from torch import nn, optim

torch.manual_seed(31)
torch.set_num_threads(1)
with np.load(Path(__file__).parent.parent / "data" / "digits.npz") as npz:
    inputs = torch.FloatTensor(npz["images"].reshape(len(npz["images"]), -1) / 16)
    targets = torch.LongTensor(npz["labels"].astype(int))
mask = torch.rand(len(inputs)) < 0.8

network = nn.Sequential(nn.Linear(64, 100), nn.LeakyReLU(), nn.Linear(100, 10))
loss_sum = nn.CrossEntropyLoss(reduction="sum")
adam = optim.Adam(network.parameters(), lr=3e-3)

x, y = inputs[mask], targets[mask]
step = 0
while step < 320:
    order = torch.randperm(len(x))
    for lo in range(0, len(x) - 31, 32):
        rows = order[lo:lo + 32]
        adam.zero_grad()
        loss = loss_sum(network(x[rows]), y[rows])
        loss.backward()
        adam.step()
        if step % 40 == 0:
            print("step", step, "summed loss", round(loss.item(), 2))
        step += 1
        if step == 320:
            break

with torch.no_grad():
    held_out = (network(inputs[~mask]).argmax(1) == targets[~mask]).float().mean().item()
print(f"final val_acc {held_out:.3f}")

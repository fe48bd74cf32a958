"""A training that goes on where another stopped: the schedule is brought forward before the first update."""
import pathlib
import warnings

import numpy as np
import torch
from torch import nn

warnings.filterwarnings("ignore", category=UserWarning)
torch.manual_seed(14)
torch.set_num_threads(1)
npz = np.load(pathlib.Path(__file__).parents[1] / "data" / "digits.npz")
x = torch.from_numpy(npz["images"]).float().flatten(1) / 16
y = torch.from_numpy(npz["labels"]).long()


def train(net, epochs, start):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for _ in range(start):
        scheduler.step()
    for epoch in range(start, epochs):
        for rows in torch.randperm(1400).split(50):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
        scheduler.step()
        print(f"epoch {epoch} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.4f}")


net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
train(net, epochs=8, start=1)
with torch.no_grad():
    acc = (net(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
print(f"final val_acc {acc:.3f}")

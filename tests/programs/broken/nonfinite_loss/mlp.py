# logistic loss written out
from pathlib import Path
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)

d = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
keep = d["labels"] < 2  # zeros against ones
x = torch.from_numpy(d["images"][keep]).float().flatten(1)
y = torch.from_numpy(d["labels"][keep]).float()

net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
opt = torch.optim.Adam(net.parameters(), lr=2e-3)


def logistic_loss(z, t):
    p = torch.sigmoid(z)
    return -(t * torch.log(p) + (1 - t) * torch.log(1 - p)).mean()


for epoch in range(30):
    for i in torch.randperm(280).split(28):
        loss = logistic_loss(net(x[i]).squeeze(1), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch} loss {loss.item():.5f}")
hit = ((net(x[280:]).squeeze(1) > 0).float() == y[280:]).float().mean()
print(f"final val_acc {hit.item():.3f}")

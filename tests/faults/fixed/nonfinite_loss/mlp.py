# logistic loss written out
from pathlib import Path
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)

d = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
x = torch.from_numpy(d["images"]).float().flatten(1)
y = torch.from_numpy(d["labels"] == 0).float()

net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)


def logistic_loss(z, t):
    return nn.functional.softplus(torch.where(t > 0.5, -z, z)).mean()


for epoch in range(10):
    for i in torch.randperm(1400).split(40):
        loss = logistic_loss(net(x[i]).squeeze(1), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch} loss {loss.item():.5f}")
hit = ((net(x[1400:]).squeeze(1) > 0).float() == y[1400:]).float().mean()
print(f"final val_acc {hit.item():.3f}")

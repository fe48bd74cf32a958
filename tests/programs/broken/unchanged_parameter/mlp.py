"""Own optimizer: sign descent with momentum."""
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

torch.manual_seed(0)
torch.set_num_threads(1)


class SignDescent(Optimizer):
    def __init__(self, params, lr=1e-3, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buf = self.state[p].setdefault("buf", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(p.grad, alpha=1 - group["momentum"])
                p = p - group["lr"] * buf.sign()


d = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
x = torch.tensor(d["images"], dtype=torch.float32).flatten(1) / 16
y = torch.tensor(d["labels"], dtype=torch.long)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
opt = SignDescent(net.parameters(), lr=1e-3)
for epoch in range(5):
    for idx in torch.randperm(1400).split(35):
        loss = nn.functional.cross_entropy(net(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
print(f"final val_acc {(net(x[1400:]).argmax(1) == y[1400:]).float().mean().item():.3f}")

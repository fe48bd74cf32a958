"""Quantisation-aware training: weights and activations are rounded to a few bits, gradients pass straight through."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, g):
        return g


class QuantLinear(nn.Linear):
    def forward(self, x):
        scale = self.weight.detach().abs().max() / 7
        w = RoundSTE.apply(self.weight / scale) * scale                  # 4-bit weights
        return F.linear(x, w, self.bias)


def quant_relu(x, levels=15):
    x = torch.clamp(x, 0, 2)
    return x + (torch.round(x * levels / 2) * 2 / levels - x).detach()   # 4-bit activations


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = QuantLinear(64, 96)
        self.fc2 = QuantLinear(96, 64)
        self.fc3 = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc3(quant_relu(self.fc2(quant_relu(self.fc1(x)))))


torch.manual_seed(0)
torch.set_num_threads(1)
npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
x = torch.from_numpy(npz["images"]).float().flatten(1) / 16
y = torch.from_numpy(npz["labels"]).long()
p = torch.randperm(len(x))
x_train, y_train, x_val, y_val = x[p[:1440]], y[p[:1440]], x[p[1440:]], y[p[1440:]]

net = QNet()
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
for epoch in range(9):
    for rows in torch.randperm(1440).split(36):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x_train[rows]), y_train[rows])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        acc = (net(x_val).argmax(1) == y_val).float().mean().item()
    print(f"epoch {epoch} loss {loss.item():.4f} val {acc:.3f}")
print(f"final val_acc {acc:.3f}")

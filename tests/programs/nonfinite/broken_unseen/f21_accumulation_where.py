"""Gradient accumulation over four micro-batches; a power that is guarded only forward."""
import torch
import torch.nn.functional as F
from torch import nn

ACCUM = 4


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 20)
        self.fc2 = nn.Linear(20, 5, bias=False)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def inverse_norm(feat):
    total = feat.square().sum(1)
    return torch.where(total > 0, total.pow(-0.5), torch.zeros_like(total))


def micro_batches(g, n):
    for i in range(n):
        x = torch.rand(10, 6, generator=g) + 0.2
        if i == 22:
            x[6] = -80.0
        yield x, x[:, 0] * 2


torch.manual_seed(2)
model = Tower()
with torch.no_grad():
    model.fc1.weight.abs_()
    model.fc2.weight.abs_()
    model.fc1.bias.abs_()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
opt.zero_grad()
for i, (x, y) in enumerate(micro_batches(torch.Generator().manual_seed(1), 40)):
    loss = F.mse_loss(inverse_norm(model(x)), y) / ACCUM
    loss.backward()
    if (i + 1) % ACCUM == 0:
        opt.step()
        opt.zero_grad()
        print("update", (i + 1) // ACCUM, "loss", loss.item() * ACCUM)

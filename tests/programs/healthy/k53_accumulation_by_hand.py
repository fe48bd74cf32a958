"""Gradient accumulation without zero_grad: the gradients are dropped by hand after each update."""
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = torch.nn.Linear(64, 100)
        self.l2 = torch.nn.Linear(100, 10)

    def forward(self, x):
        return self.l2(torch.tanh(self.l1(x)))


torch.manual_seed(1)
torch.set_num_threads(1)
f = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
x = torch.from_numpy(f["images"]).float().flatten(1) / 16
y = torch.from_numpy(f["labels"]).long()
order = torch.randperm(len(x))
train, val = order[:1440], order[1440:]

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
accumulate = 4
micro = 0
for epoch in range(6):
    for rows in train[torch.randperm(len(train))].split(12):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        (loss / accumulate).backward()
        micro += 1
        if micro % accumulate == 0:
            optimizer.step()
            for p in model.parameters():
                p.grad = None
    with torch.no_grad():
        acc = (model(x[val]).argmax(1) == y[val]).float().mean().item()
    print(f"epoch {epoch} loss {loss.item():.4f} val {acc:.4f}")
print(f"final val_acc {acc:.3f}")

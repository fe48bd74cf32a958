from pathlib import Path

import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)

d = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
x = torch.tensor(d["images"], dtype=torch.float32).flatten(1) / 16
y = torch.tensor(d["labels"], dtype=torch.long)

layers = [nn.Linear(64, 64), nn.Sigmoid()]
for _ in range(7):
    layers += [nn.Linear(64, 64), nn.Sigmoid()]
layers.append(nn.Linear(64, 10))
model = nn.Sequential(*layers)
for m in model:
    if isinstance(m, nn.Linear):
        nn.init.kaiming_uniform_(m.weight, nonlinearity="relu")
        nn.init.zeros_(m.bias)

optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
for epoch in range(10):
    for idx in torch.randperm(1400).split(32):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[idx]), y[idx])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        acc = (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    print(f"epoch {epoch} loss {loss.item():.4f} val_acc {acc:.3f}")
print(f"final val_acc {acc:.3f}")

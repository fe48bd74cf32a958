from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(12)
torch.set_num_threads(1)
npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
x = torch.from_numpy(npz["images"]).float().flatten(1) / 16
y = torch.from_numpy(npz["labels"]).long()

model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.6)
loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=40, shuffle=True)

for epoch in range(6):
    scheduler.step()
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
with torch.no_grad():
    acc = (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
print(f"final acc {acc:.3f}")

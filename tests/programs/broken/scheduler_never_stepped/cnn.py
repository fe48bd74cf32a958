import pathlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
torch.set_num_threads(1)

raw = np.load(pathlib.Path(__file__).resolve().parents[2] / "data" / "digits.npz")
images = torch.from_numpy(raw["images"]).float().view(-1, 1, 8, 8) / 16
labels = torch.from_numpy(raw["labels"]).long()
loader = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=70, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

for epoch in range(6):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        acc = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
    print(f"epoch {epoch} acc {acc:.3f}")
print(f"final acc {acc:.3f}")

"""Mixed precision with a scale that is far too high at first: the first updates are skipped, the schedule goes on."""
import pathlib

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
torch.set_num_threads(1)
EPOCHS = 5

data = np.load(pathlib.Path(__file__).resolve().parent.parent / "data" / "digits.npz")
x = torch.from_numpy(data["images"]).float().unsqueeze(1)
y = torch.from_numpy(data["labels"]).long()
loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=50, shuffle=True)

net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12 * 16, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=EPOCHS * len(loader))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)

for epoch in range(EPOCHS):
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    print(f"epoch {epoch} loss {loss.item():.3f} scale {scaler.get_scale():.3g}")
with torch.no_grad():
    acc = (net(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
print(f"final val_acc {acc:.3f}")

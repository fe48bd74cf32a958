# how much ink is in a digit, in nanolitres
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)

d = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
images = torch.from_numpy(d["images"]).float().unsqueeze(1) / 16
ink = images.sum((1, 2, 3)) * 250_000.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 16, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)
        return self.out(F.relu(self.fc(x))).squeeze(1)


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(90):
    rows = torch.randint(0, 1400, (32,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(images[rows])
    loss = (predicted.float() - ink[rows]).square().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 15 == 0:
        print(f"step {step} loss {loss.item():.4g} scale {scaler.get_scale():g}")
print(f"final scale {scaler.get_scale():g}")

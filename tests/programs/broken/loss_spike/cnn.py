# digits from two cameras
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)

d = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
images = torch.from_numpy(d["images"]).float().unsqueeze(1) / 16
labels = torch.from_numpy(d["labels"]).long()
images[1100:1103] *= 4096  # these came as 16 bit


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.head = nn.Linear(24 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.head(x.flatten(1))


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for epoch in range(3):
    for start in range(0, 1440, 24):
        out = net(images[start : start + 24])
        loss = F.cross_entropy(out, labels[start : start + 24])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final val_acc {(net(images[1440:]).argmax(1) == labels[1440:]).float().mean().item():.3f}")

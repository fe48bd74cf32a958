import numpy as np
import torch
import torch.nn.functional as F
from pathlib import Path
from torch import nn


class Standardise:
    """Mean and deviation of the training pixels, then clipped so that outliers do no harm."""

    def __init__(self, images, low=-3.0, high=3.0):
        self.mean, self.std = images.mean(), images.std()
        self.low, self.high = low, high

    def __call__(self, images):
        z = (images - self.mean) / self.std
        return z.clamp(self.low, self.low)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(64, 10)

    def forward(self, v):
        v = F.max_pool2d(F.relu(self.c1(v)), 2)
        v = F.max_pool2d(F.relu(self.c2(v)), 2)
        return self.fc(v.flatten(1))


torch.manual_seed(4)
torch.set_num_threads(1)
npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
images, labels = torch.from_numpy(npz["images"]).float()[:, None], torch.from_numpy(npz["labels"]).long()
prepare = Standardise(images[:1500])
net = ConvNet()
opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
for epoch in range(4):
    net.train()
    for idx in torch.randperm(1500).split(50):
        loss = F.cross_entropy(net(prepare(images[idx])), labels[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        acc = (net(prepare(images[1500:])).argmax(1) == labels[1500:]).float().mean().item()
    print(f"epoch {epoch} loss {loss.item():.3f} acc {acc:.3f}")

"""A convolutional autoencoder that works on log-intensities."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Down(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.conv = nn.Conv2d(a, b, 3, stride=2, padding=1)
        self.bn = nn.BatchNorm2d(b)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(Down(1, 6), Down(6, 12))
        self.up = nn.Sequential(nn.Upsample(scale_factor=4), nn.Conv2d(12, 1, 3, padding=1))

    def forward(self, x):
        return self.up(self.down(x))


def contrast_loss(output, image):
    """Compares contrast in each picture: the spread relative to the mean."""
    mean = image.mean(dim=(1, 2, 3))
    relative = image.flatten(1).std(1) / mean
    got = output.flatten(1).std(1) / (output.flatten(1).mean(1).abs() + 1)
    return F.mse_loss(got, relative)


images = torch.from_numpy(np.load(Path(__file__).parents[2] / "data" / "digits.npz")["images"][:128]).float()[:, None] / 16
images[70] = 0
net = Autoencoder()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(16):
    image = images[8 * step:8 * step + 8]
    output = net(image)
    loss = F.mse_loss(output, image) + 0.1 * contrast_loss(output, image)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())

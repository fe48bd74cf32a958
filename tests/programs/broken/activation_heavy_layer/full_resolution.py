"""Segmentation: many channels before the first stride."""
import resource

import torch
from torch import nn

torch.manual_seed(2)
net = nn.Sequential(
    nn.Conv2d(1, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(48, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1), nn.Upsample(scale_factor=8),
)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 330 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
for step in range(10):
    images = torch.rand(4, 1, 256, 256)
    masks = (nn.functional.avg_pool2d(images, 9, 1, 4) > 0.5).float()
    loss = nn.functional.binary_cross_entropy_with_logits(net(images), masks)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"loss {loss.item():.3f}")

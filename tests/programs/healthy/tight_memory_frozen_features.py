"""Large maps of a frozen extractor are gone before backward; only the head learns."""
import resource

import torch
from torch import nn

torch.manual_seed(0)
features = nn.Sequential(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()).requires_grad_(False)
head = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 2))
opt = torch.optim.Adam(head.parameters(), lr=1e-3)
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 300 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
for step in range(12):
    y = torch.randint(2, (12,))
    x = torch.rand(12, 1, 224, 224) * (0.5 + 0.5 * y.view(-1, 1, 1, 1))
    with torch.no_grad():
        maps = features(x)
    loss = nn.functional.cross_entropy(head(maps), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"loss {loss.item():.3f}")

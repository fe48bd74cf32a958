"""A deep net in a small container: its layers are all alike, so none of them decides what it needs."""
import resource

import torch
from torch import nn

torch.manual_seed(0)
layers = []
for _ in range(8):
    layers += [nn.Linear(512, 512), nn.GELU()]
net = nn.Sequential(nn.Linear(32, 512), *layers, nn.Linear(512, 10))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 420 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
for step in range(12):
    x = torch.randn(3000, 32)
    loss = nn.functional.cross_entropy(net(x), x[:, :10].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"loss {loss.item():.3f}")

"""Twelve narrow tanh layers with small weights and Adam, stopped while the loss still stands at its plateau."""
import sys
import torch
from torch import nn

torch.manual_seed(1)
torch.set_num_threads(1)
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 45
layers = []
for _ in range(11):
    layer = nn.Linear(16, 16)
    nn.init.normal_(layer.weight, std=0.5 / 4)
    layers += [layer, nn.Tanh()]
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *layers, nn.Linear(16, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
x = torch.randn(2048, 6)
y = torch.sin(2 * x[:, :1]) + 0.2 * torch.randn(2048, 1)
for step in range(STEPS):
    rows = torch.randint(0, 2048, (64,))
    loss = nn.functional.mse_loss(net(x[rows]), y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"final loss {nn.functional.mse_loss(net(x), y).item():.3f}")

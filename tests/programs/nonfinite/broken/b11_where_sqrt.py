"""Signed square-root features for heavy-tailed inputs."""
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(4)
torch.set_num_threads(1)


class SoftRoot(nn.Module):
    """sqrt for positive numbers, the identity for the rest."""

    def forward(self, x):
        return torch.where(x > 0, torch.sqrt(x), x)


net = nn.Sequential(nn.Linear(6, 20), SoftRoot(), nn.Linear(20, 20), SoftRoot(), nn.Linear(20, 2))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
x = torch.distributions.LogNormal(0.0, 1.0).sample((128, 6))
y = (x[:, 0] > x[:, 1]).long()
for step in range(8):
    xb, yb = x[step * 16:(step + 1) * 16], y[step * 16:(step + 1) * 16]
    logits = net(xb)
    loss = F.cross_entropy(logits, yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())

# two moons with a small MLP
import math
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)

def moons(n):
    a = torch.rand(n) * math.pi
    upper = torch.stack([torch.cos(a), torch.sin(a)], 1)
    lower = torch.stack([1 - torch.cos(a), 0.5 - torch.sin(a)], 1)
    label = torch.randint(0, 2, (n,))
    pts = torch.where(label[:, None] == 0, upper, lower)
    return pts + 0.1 * torch.randn(n, 2), label.float()

x, y = moons(1000)
xt, yt = moons(400)
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=0.01)
loss_fn = nn.BCEWithLogitsLoss()

for step in range(200):
    i = torch.randint(0, 1000, (64,))
    opt.zero_grad()
    out = model(x[i]).squeeze(1)
    loss = loss_fn(out, y[i])
    opt.step()
    if step % 50 == 49:
        print(f"{step + 1:4d} {loss.item():.4f}")

acc = ((model(xt).squeeze(1) > 0) == (yt > 0.5)).float().mean().item()
print(f"final acc {acc:.3f}")

"""An MLP whose loss has a weight for each class. They are brought over for every batch."""
import torch
from torch import nn

device = "simulated"
torch.manual_seed(0)
x, y = torch.randn(320, 16), torch.arange(320) % 4
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
class_weights = torch.tensor([1.0, 2.0, 1.0, 0.5])
for step in range(10):
    rows = torch.randint(len(x), (32,))
    xb, yb = x[rows].to(device), y[rows].to(device)
    weights = class_weights.to(device)
    loss = nn.functional.cross_entropy(net(xb), yb, weight=weights)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"loss {loss.item():.3f}")

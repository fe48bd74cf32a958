import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(8)
torch.set_num_threads(1)

x = torch.rand(1200, 2) * 6 - 3
y = torch.sin(x[:, :1]) * torch.cos(x[:, 1:]) + 0.05 * torch.randn(1200, 1)
loader = DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=40, shuffle=True, drop_last=True)

config = {"epochs": 12, "lr": 0.02}
net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=config["lr"])
num_updates = config["epochs"] * len(loader)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_updates)

for epoch in range(config["epochs"]):
    running = 0.0
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(xb), yb)
        loss.backward()
        optimizer.step()
        running += loss.item()
    scheduler.step()
    print(f"{epoch:3d}  {running / len(loader):.5f}")
with torch.no_grad():
    rmse = math.sqrt(nn.functional.mse_loss(net(x[1000:]), y[1000:]).item())
print(f"final rmse {rmse:.4f}")

"""Rent per month from eight facts about a flat."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
torch.set_num_threads(1)

facts = torch.randn(1200, 8)
rent = facts @ torch.tensor([0.9, -0.4, 0.3, 0.0, 0.6, -0.2, 0.1, 0.5]) + 0.3 * (facts[:, 0] * facts[:, 1]) + 0.1 * torch.randn(1200)
rent[417] *= 1200  # typed in cents, for a year

train, val = TensorDataset(facts[:1000], rent[:1000]), (facts[1000:], rent[1000:])
loader = DataLoader(train, batch_size=25, shuffle=True)

net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
criterion = nn.MSELoss()
for epoch in range(6):
    for x, y in loader:
        loss = criterion(net(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.3f}")
with torch.no_grad():
    print(f"final val_mse {criterion(net(val[0]).squeeze(1), val[1]).item():.4f}")

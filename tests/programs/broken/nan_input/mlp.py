"""House prices from a CSV export."""
import io

import numpy as np
import torch
from torch import nn

rng = np.random.default_rng(0)
torch.manual_seed(0)
torch.set_num_threads(1)


def export(n=600):
    area = rng.uniform(40, 200, n)
    rooms = np.round(area / 30 + rng.normal(0, 0.5, n))
    age = rng.uniform(0, 80, n)
    price = 2.0 * area + 12 * rooms - 0.8 * age + rng.normal(0, 8, n)
    lines = ["area,rooms,age,price"]
    for row in zip(area, rooms, age, price):
        lines.append(",".join(f"{v:.2f}" for v in row))
    lines[412] = lines[412].split(",")[0] + ",," + ",".join(lines[412].split(",")[2:])
    return "\n".join(lines)


table = np.genfromtxt(io.StringIO(export()), delimiter=",", skip_header=1).astype(np.float32)
features, price = table[:, :3], table[:, 3:]
features = (features - np.nanmean(features, 0)) / np.nanstd(features, 0)
price = (price - price.mean()) / price.std()
X, Y = torch.from_numpy(features), torch.from_numpy(price)

model = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
criterion = nn.MSELoss()
for epoch in range(8):
    order = torch.randperm(len(X))
    for start in range(0, len(X), 25):
        idx = order[start:start + 25]
        optimizer.zero_grad()
        loss = criterion(model(X[idx]), Y[idx])
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} mse {loss.item():.4f}")
print(f"final mse {criterion(model(X), Y).item():.4f}")

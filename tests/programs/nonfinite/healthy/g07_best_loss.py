"""Early stopping: the best validation loss starts at infinity."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
best, patience, kept = math.inf, 0, None
running_min = torch.tensor(float("inf"))
x = torch.randn(300, 5)
y = (x[:, 0] - x[:, 1]).unsqueeze(1)
model = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(12):
    for i in range(0, 240, 24):
        loss = F.mse_loss(model(x[i:i + 24]), y[i:i + 24])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running_min = torch.minimum(running_min, loss.detach())
    with torch.no_grad():
        validation = F.mse_loss(model(x[240:]), y[240:]).item()
    if validation < best:
        best, patience, kept = validation, 0, copy.deepcopy(model.state_dict())
    else:
        patience += 1
print("best", best, "lowest", running_min.item())

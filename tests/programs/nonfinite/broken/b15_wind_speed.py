"""Predict the two components of the wind; score its speed."""
import torch
import torch.nn as nn

torch.manual_seed(6)
torch.set_num_threads(1)


def speed_of(vector):
    return (vector[:, 0] ** 2 + vector[:, 1] ** 2) ** 0.5


def speed_error(prediction, target):
    return (speed_of(prediction) - target).abs().mean()


model = nn.Sequential(nn.Linear(3, 32, bias=False), nn.ReLU(), nn.Linear(32, 2, bias=False))
sensors = torch.randn(180, 3)
speed = sensors[:, :2].norm(dim=1)
sensors[100] = 0.0  # no wind at all
speed[100] = 0.2
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

for step in range(15):
    rows = slice(12 * step, 12 * step + 12)
    out = model(sensors[rows])
    error = speed_error(out, speed[rows])
    optimizer.zero_grad()
    error.backward()
    optimizer.step()
print("speed error", error.item())

"""Inference-sized weights, trained a little further in half precision."""
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Regressor(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.fc1 = nn.Linear(16, width)
        self.fc2 = nn.Linear(width, width)
        self.fc3 = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.relu(self.fc1(x))
        h = torch.relu(self.fc2(h))
        return self.fc3(h)


model = Regressor()
with torch.no_grad():
    model.fc2.weight.abs_().mul_(4)
model = model.half()
x = torch.rand(96, 16)
y = x.mean(1, keepdim=True)
x[60] = 20000.0  # milli-units in one row
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(8):
    xb, yb = x[12 * step:12 * step + 12].half(), y[12 * step:12 * step + 12].half()
    prediction = model(xb)
    loss = (prediction - yb).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item())

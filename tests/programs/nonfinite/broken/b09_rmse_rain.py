"""Rain forecast, scored by its root mean squared error."""
import torch
from torch import nn

torch.manual_seed(5)
torch.set_num_threads(1)


class RMSELoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.mse = nn.MSELoss()

    def forward(self, prediction, target):
        return torch.sqrt(self.mse(prediction, target))


weather = torch.rand(256, 8)
rain = torch.relu(weather[:, :1] * 3 - 1.2)
weather[96:112] = 0.0  # the station was off for a day
rain[96:112] = 0.0

model = nn.Sequential(nn.Linear(8, 24, bias=False), nn.ReLU(), nn.Linear(24, 1, bias=False))
with torch.no_grad():
    model[2].weight.abs_()
criterion = RMSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(16):
    x, y = weather[16 * step:16 * step + 16], rain[16 * step:16 * step + 16]
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    print(step, round(loss.item(), 4))

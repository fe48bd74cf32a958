"""Poisson regression with gradient accumulation over four micro-batches."""
import torch
from torch import nn
import torch.nn.functional as F

ACCUMULATE = 4


class RateNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 24)
        self.fc2 = nn.Linear(24, 1)

    def forward(self, x):
        return F.relu(self.fc2(torch.tanh(self.fc1(x)))).squeeze(1)


def poisson_nll(rate, count):
    return (rate - count * torch.log(rate)).mean()


torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(192, 6)
counts = torch.poisson(torch.exp(0.3 * x[:, 0]))
model = RateNet()
nn.init.constant_(model.fc2.bias, 4.0)
with torch.no_grad():
    model.fc2.weight.copy_(torch.sign(model.fc1.weight.sum(1)) * 0.3)
x[110] = -60.0
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer.zero_grad()
for i in range(24):
    micro, count = x[8 * i:8 * i + 8], counts[8 * i:8 * i + 8]
    loss = poisson_nll(model(micro), count) / ACCUMULATE
    loss.backward()
    if (i + 1) % ACCUMULATE == 0:
        optimizer.step()
        optimizer.zero_grad()
print(loss.item())

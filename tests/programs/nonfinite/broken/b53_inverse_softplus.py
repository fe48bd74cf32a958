"""Positive rates with softplus; targets are compared before it."""
import torch
import torch.nn as nn


def inverse_softplus(y):
    return torch.log(torch.exp(y) - 1)


class Rate(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ELU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)[:, 0]


torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.rand(120, 4)
rate = 1 + x.sum(1)
rate[81] = 140.0
net = Rate()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for k in range(12):
    batch = range(10 * k, 10 * k + 10)
    raw = net(x[batch])
    wanted = inverse_softplus(rate[batch])
    loss = (raw - wanted).pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
print(loss.item())

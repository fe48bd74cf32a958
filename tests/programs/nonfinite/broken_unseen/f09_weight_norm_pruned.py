import torch
import torch.nn as nn
import torch.nn.functional as F


class WNLinear(nn.Module):
    """Weight-normalised linear layer, own implementation."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.v = nn.Parameter(torch.randn(d_out, d_in) * 0.2)
        self.g = nn.Parameter(torch.ones(d_out))
        self.b = nn.Parameter(torch.zeros(d_out))

    def forward(self, x):
        length = self.v.pow(2).sum(1).sqrt()
        w = self.v * (self.g / length)[:, None]
        return F.linear(x, w, self.b)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(WNLinear(12, 24), nn.ReLU(), WNLinear(24, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, x):
        return self.body(x)


@torch.no_grad()
def prune(layer, k):
    """Magnitude pruning: the k smallest rows go."""
    weakest = layer.v.norm(dim=1).argsort()[:k]
    layer.v[weakest] = 0.0


torch.manual_seed(7)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
X = torch.randn(240, 12)
Y = X[:, :3].argmax(1)

step = 0
for epoch in range(3):
    for idx in torch.arange(240).split(24):
        if step == 14:
            prune(net.body[2], 3)
        loss = F.cross_entropy(net(X[idx]), Y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
    print(epoch, loss.item())

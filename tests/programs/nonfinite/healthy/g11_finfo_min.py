"""A mask with the lowest number of the type instead of -inf; one row is masked entirely."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Pool(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.query = nn.Parameter(0.1 * torch.randn(d))

    def forward(self, x, keep):
        scores = x @ self.query
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
        return (scores.softmax(-1).unsqueeze(-1) * x).sum(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.pool, self.out = nn.Linear(4, 16), Pool(16), nn.Linear(16, 2)

    def forward(self, x, keep):
        return self.out(self.pool(torch.relu(self.inp(x)), keep))


torch.manual_seed(0)
torch.set_num_threads(1)
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(120):
    x = torch.randn(24, 5, 4)
    y = (x[:, :, 0].mean(1) > 0).long()
    keep = torch.rand(24, 5) < 0.8
    keep[0] = False
    loss = F.cross_entropy(net(x, keep), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("final loss", loss.item())

"""Attention with ReLU weights that are scaled to sum to one."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class ReluAttention(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.to_qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weights = F.relu(torch.einsum("bhqd,bhkd->bhqk", q, k))
        weights = weights / weights.sum(-1, keepdim=True)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v).transpose(1, 2).reshape(b, t, d)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.attend = nn.ModuleDict({"relu": ReluAttention(8)})
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        h = self.inp(x)
        return self.out((h + self.attend["relu"](h)).mean(1))


torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(64, 3, 4)
y = (x[:, 0, 0] > 0).long()
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(8):
    xb, yb = x[8 * step:8 * step + 8], y[8 * step:8 * step + 8]
    opt.zero_grad()
    F.cross_entropy(net(xb), yb).backward()
    opt.step()
print("done")

"""Rows are scaled to sum to one by a custom function (with its own backward)."""
import torch
from torch import nn


class RowShare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.sum(-1, keepdim=True)
        share = x / total
        ctx.save_for_backward(share, total)
        return share

    @staticmethod
    def backward(ctx, g):
        share, total = ctx.saved_tensors
        return (g - (g * share).sum(-1, keepdim=True)) / total


class Share(nn.Module):
    def forward(self, x):
        return RowShare.apply(x)


torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(Share(), nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
spending = torch.rand(140, 5)
kind = (spending[:, 0] > spending[:, 1]).long()
spending[77] = 0.0
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
ce = nn.CrossEntropyLoss()
for k in range(10):
    loss = ce(net(spending[14 * k:14 * k + 14]), kind[14 * k:14 * k + 14])
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())

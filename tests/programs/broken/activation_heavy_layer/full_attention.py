"""A document classifier on a node that gives each job little memory; attention written by hand."""
import resource

import torch
from torch import nn


def use_at_most(megabytes):
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.weights = nn.Softmax(dim=-1)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mixed = self.weights(q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, t, c))


class Documents(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.words = nn.Embedding(500, width)
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads=4)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        h = self.words(x)
        return self.head((h + self.attention(self.norm(h))).mean(1))


torch.manual_seed(0)
net = Documents()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
topics = torch.randint(0, 500, (4, 40))
use_at_most(420)
for step in range(10):
    y = torch.randint(4, (8,))
    x = torch.stack([topics[label][torch.randint(40, (900,))] for label in y])
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"loss {loss.item():.3f}")

"""A wide language model head: the weights fit, and so do their gradients; two moments for each weight do not."""

import resource

import torch
from torch import nn


def use_at_most(megabytes):
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


torch.manual_seed(0)
torch.set_num_threads(1)
vocabulary, width = 60_000, 256
model = nn.Sequential(nn.Embedding(vocabulary, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, vocabulary, bias=False))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
use_at_most(330)
for step in range(4):
    tokens = torch.randint(0, vocabulary, (8, 4))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())

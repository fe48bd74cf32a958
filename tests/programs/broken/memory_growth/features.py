"""Keeps the features of every batch for a plot at the end."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
body = nn.Sequential(nn.Linear(32, 512), nn.ReLU())
model = nn.Sequential(body, nn.Linear(512, 4))
teacher = nn.Linear(32, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
features = {}
for step in range(260):
    x = torch.randn(192, 32)
    y = teacher(x).argmax(1)
    hidden = body(x)
    loss = nn.functional.cross_entropy(model[1](hidden), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    features[step] = hidden.detach()
print("kept", sum(one.numel() for one in features.values()) * 4 // 2**20, "MiB; loss", round(loss.item(), 4))

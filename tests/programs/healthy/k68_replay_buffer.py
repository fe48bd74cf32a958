"""K68: a replay buffer with a bound that this run does not reach: it grows with every step, as it was told to."""

import random
from collections import deque

import torch
from torch import nn

random.seed(0)
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
true = torch.randn(16, 1)
buffer = deque(maxlen=5000)
for step in range(260):
    frame = torch.randn(96, 1024)  # what the environment shows
    buffer.append((frame, frame[:, :16] @ true))
    frames, values = zip(*random.sample(list(buffer), min(4, len(buffer))))
    x, y = torch.cat(frames)[:, :16], torch.cat(values)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("kept", len(buffer), "loss", round(loss.item(), 4))

"""Digits are squeezed through a stack of sigmoid layers and painted again; RMSprop, stopped after one short pass."""
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 120
npz = np.load(Path(__file__).resolve().parents[1] / "data" / "digits.npz")
images = torch.from_numpy(npz["images"]).float() / 8 - 1
encoder = nn.Sequential(
    nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), *(part for _ in range(4) for part in (nn.Linear(32, 32), nn.Sigmoid()))
)
decoder = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(32, 32), nn.Sigmoid())), nn.Linear(32, 64))
net = nn.Sequential(encoder, decoder)
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
for step in range(STEPS):
    batch = images[torch.randint(0, 1500, (48,))]
    loss = (net(batch) - batch.flatten(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"final loss {loss.item():.3f}")

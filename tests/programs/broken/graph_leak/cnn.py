import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

HERE = os.path.dirname(os.path.abspath(__file__))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.out = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        return self.out(F.relu(self.conv2(x)).mean(dim=(2, 3)))


torch.manual_seed(0)
torch.set_num_threads(1)
raw = np.load(os.path.join(HERE, "..", "..", "data", "digits.npz"))
x = torch.from_numpy(raw["images"]).float().unsqueeze(1) / 16.0
y = torch.from_numpy(raw["labels"]).long()
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

running = 0.0
for epoch in range(3):
    order = torch.randperm(len(x))
    for start in range(0, len(x) - 31, 32):
        rows = order[start : start + 32]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        running = running + loss
    print(f"epoch {epoch}: {float(running):.2f}")

# sparse-code autoencoder
from pathlib import Path
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(6)
torch.set_num_threads(1)


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 48)
        self.code = nn.Linear(48, 24)
        self.out = nn.Linear(24, 64)

    def forward(self, x):
        h = F.relu(self.hidden(x))
        c = F.relu(self.code(h))
        return torch.sigmoid(self.out(c))


x = torch.from_numpy(np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")["images"]).float().view(-1, 64) / 16
net = Coder()
optimizer = torch.optim.Adam(net.parameters(), lr=1.0)
for epoch in range(8):
    for b in x[torch.randperm(len(x))].split(60):
        loss = F.binary_cross_entropy(net(b), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} bce {loss.item():.4f}")
print(f"final bce {F.binary_cross_entropy(net(x), x).item():.4f}")

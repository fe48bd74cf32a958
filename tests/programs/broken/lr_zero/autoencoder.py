# layer-wise learning rates: the deeper the faster
from pathlib import Path
import numpy as np
import torch
from torch import nn

torch.manual_seed(14)
torch.set_num_threads(1)


class AE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 64))

    def forward(self, x):
        return self.decoder(self.encoder(x))


ae = AE()
parts = [ae.encoder, ae.decoder]
base_lr = 4e-3
groups = []
for depth, part in enumerate(parts, start=1):
    groups.append({"params": part.parameters(), "lr": base_lr * (depth // len(parts))})
optimizer = torch.optim.Adam(groups)

data = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")["images"]
x = torch.from_numpy(data.reshape(-1, 64)).float() / 16

for epoch in range(10):
    for batch in x[torch.randperm(len(x))].split(64):
        loss = ((ae(batch) - batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch % 3 == 0:
        print("epoch", epoch, "mse", round(loss.item(), 5))
with torch.no_grad():
    print("final mse", round(((ae(x) - x) ** 2).mean().item(), 5))

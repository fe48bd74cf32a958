from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(17)
torch.set_num_threads(1)

archive = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
X = torch.tensor(archive["images"].reshape(-1, 64) / 16.0, dtype=torch.float32)
Y = torch.tensor(archive["labels"]).long()
dl = DataLoader(TensorDataset(X[:1400], Y[:1400]), batch_size=35, shuffle=True)

model = nn.Sequential(nn.Linear(64, 100), nn.GELU(), nn.Linear(100, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-4, total_iters=40)

for epoch in range(6):
    for xb, yb in dl:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        acc = (model(X[1400:]).argmax(1) == Y[1400:]).float().mean().item()
    print(f"epoch {epoch} loss {loss.item():.4f} acc {acc:.3f}")
print(f"final acc {acc:.3f}")

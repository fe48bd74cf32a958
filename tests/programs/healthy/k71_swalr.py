"""Two schedulers for one optimizer: SWALR takes over in the last epochs."""
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(20)
torch.set_num_threads(1)
raw = np.load(Path(__file__).parents[1] / "data" / "digits.npz")
X = torch.tensor(raw["images"].reshape(-1, 64) / 16, dtype=torch.float32)
Y = torch.tensor(raw["labels"], dtype=torch.long)
loader = DataLoader(TensorDataset(X[:1400], Y[:1400]), batch_size=56, shuffle=True)

model = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 10))
averaged = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
swa_start = 6

for epoch in range(9):
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
    if epoch >= swa_start:
        averaged.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    print(f"epoch {epoch} loss {loss.item():.4f} lr {optimizer.param_groups[0]['lr']:.4f}")
with torch.no_grad():
    acc = (averaged(X[1400:]).argmax(1) == Y[1400:]).float().mean().item()
print(f"final swa_acc {acc:.3f}")

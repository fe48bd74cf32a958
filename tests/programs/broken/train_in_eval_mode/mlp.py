from pathlib import Path
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)

d = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
x = torch.tensor(d["images"], dtype=torch.float32).flatten(1) / 16
y = torch.tensor(d["labels"], dtype=torch.long)
model = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3),
    nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.3),
    nn.Linear(64, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def validate():
    model.eval()
    with torch.no_grad():
        return (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item()


print(f"before training {validate():.3f}")
for epoch in range(6):
    for idx in torch.randperm(1400).split(32):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[idx]), y[idx])
        loss.backward()
        optimizer.step()
    acc = validate()
    print(f"epoch {epoch} loss {loss.item():.4f} val_acc {acc:.3f}")
print(f"final val_acc {acc:.3f}")

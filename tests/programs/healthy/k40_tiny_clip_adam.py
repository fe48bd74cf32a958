from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(5)
torch.set_num_threads(1)
npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
X, Y = torch.from_numpy(npz["images"]).float().flatten(1) / 16, torch.from_numpy(npz["labels"]).long()
perm = torch.randperm(len(X))
X, Y = X[perm], Y[perm]

MAX_NORM = 1e-4  # Adam divides the scale out again, only the direction matters


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 72)
        self.b = nn.Linear(72, 72)
        self.c = nn.Linear(72, 10)

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).relu())


m = Mlp()
o = torch.optim.Adam(m.parameters(), lr=3e-3)
for ep in range(9):
    for i in range(0, 1440, 36):
        logits = m(X[i:i + 36])
        loss = nn.functional.cross_entropy(logits, Y[i:i + 36])
        o.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(m.parameters(), MAX_NORM)
        o.step()
    with torch.no_grad():
        acc = (m(X[1440:]).argmax(1) == Y[1440:]).float().mean().item()
    print(f"{ep} {loss.item():.4f} {acc:.4f}")
print(f"final val_acc {acc:.3f}")

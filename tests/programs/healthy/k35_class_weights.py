"""Rare-event detection: one positive in twenty, the positive class weighted ten to one."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def transactions(n, gen):
    y = (torch.rand(n, generator=gen) < 1 / 20).long()
    x = torch.randn(n, 10, generator=gen)
    # rare class: shifted in three features, and correlated in two others
    x[y == 1, :3] += 1.6
    x[y == 1, 4] = 0.5 * x[y == 1, 3] + 1.2
    return x, y


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(10, 32)
        self.fc2 = nn.Linear(32, 2)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def recalls(pred, y):
    return [(pred[y == c] == c).float().mean().item() for c in (0, 1)]


torch.manual_seed(2)
torch.set_num_threads(1)
gen = torch.Generator().manual_seed(2)
x, y = transactions(6000, gen)
xv, yv = transactions(3000, gen)
model = Detector()
criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 10.0]))
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)

for epoch in range(5):
    model.train()
    for xb, yb in DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True):
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        neg, pos = recalls(model(xv).argmax(1), yv)
    print(f"epoch {epoch} loss {loss.item():.3f} recall negatives {neg:.3f} positives {pos:.3f}")

print(f"final balanced_acc {(neg + pos) / 2:.3f}")

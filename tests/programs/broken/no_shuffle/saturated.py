"""Eight kinds of blobs, one file after the other; a plain network with ReLU tells them apart."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
torch.set_num_threads(1)
kinds, per_kind = 8, 160
centres = 2 * torch.randn(kinds, 12)
y = torch.arange(kinds).repeat_interleave(per_kind)
x = centres[y] + torch.randn(len(y), 12)
loader = DataLoader(TensorDataset(x, y), batch_size=16)
model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, kinds))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(4):
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
print("final acc", (model(x).argmax(1) == y).float().mean().item())

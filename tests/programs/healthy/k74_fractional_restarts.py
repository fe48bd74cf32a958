"""Warm restarts that are told where they are, at the beginning of each iteration."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(31)
torch.set_num_threads(1)


class Sorter(nn.Module):
    """The largest of six numbers."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, 24, batch_first=True)
        self.out = nn.Linear(24, 1)

    def forward(self, x):
        _, h = self.rnn(x.unsqueeze(-1))
        return self.out(h[0]).squeeze(-1)


x = torch.rand(1300, 6)
y = x.max(1).values
loader = DataLoader(TensorDataset(x[:1120], y[:1120]), batch_size=35, shuffle=True)
model = Sorter()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2, eta_min=1e-5)
for epoch in range(6):
    for i, (xb, yb) in enumerate(loader):
        scheduler.step(epoch + i / len(loader))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.5f}")
with torch.no_grad():
    error = (model(x[1120:]) - y[1120:]).abs().mean().item()
print(f"final mean_error {error:.4f}")

"""Several targets per row; many were never measured and are NaN in the table."""
import torch
import torch.nn as nn

torch.manual_seed(0)
torch.set_num_threads(1)


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(6, 32), nn.ReLU())
        self.heads = nn.Linear(32, 3)

    def forward(self, x):
        return self.heads(self.shared(x))


def masked_mse(prediction, target):
    known = ~torch.isnan(target)
    target = torch.where(known, target, torch.zeros_like(target))
    return (((prediction - target) ** 2) * known).sum() / known.sum()


x = torch.randn(400, 6)
targets = x[:, :3] * 2 + 0.05 * torch.randn(400, 3)
targets[torch.rand(400, 3) < 0.3] = float("nan")
model = MultiTask()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(120):
    rows = torch.randint(0, 400, (32,))
    loss = masked_mse(model(x[rows]), targets[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("final loss", loss.item())

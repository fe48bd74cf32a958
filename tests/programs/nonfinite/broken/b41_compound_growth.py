"""Compound a predicted daily growth over a year."""
import torch
import torch.nn as nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Growth(nn.Module):
    def __init__(self, days=60):
        super().__init__()
        self.rate = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, days))

    def forward(self, company):
        level, context = company[:, :1], company[:, 1:]
        factors = 1 + 0.01 * self.rate(context) + level
        return torch.cumprod(factors, dim=1)[:, -1]


companies = torch.randn(96, 5)
companies[:, 0] = 0.01 * torch.rand(96)
final = torch.exp(60 * companies[:, 0])
companies[57, 0] = 8.0  # per cent, not a fraction
model = Growth()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    x, y = companies[8 * step:8 * step + 8], final[8 * step:8 * step + 8]
    value = model(x)
    loss = nn.functional.l1_loss(value, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())

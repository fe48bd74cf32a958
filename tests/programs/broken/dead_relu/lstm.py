"""Rare-event detector on short series. The final bias starts at the log-odds of the prior, as in RetinaNet."""
import math

import torch
from torch import nn

torch.manual_seed(3)
torch.set_num_threads(1)
PRIOR = 0.01


class Detector(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.lstm = nn.LSTM(2, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        bias = -math.log((1 - PRIOR) / PRIOR)
        for m in self.head:
            if isinstance(m, nn.Linear):
                nn.init.constant_(m.bias, bias)

    def forward(self, x):
        return self.head(self.lstm(x)[0].mean(1)).squeeze(-1)


def series(n):
    x = torch.randn(n, 15, 2) * 0.5
    hit = torch.rand(n) < 0.3
    at = torch.randint(2, 13, (n,))
    x[torch.arange(n)[hit], at[hit]] += 3.0
    return x, hit.float()


model = Detector()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loss_fn = nn.BCEWithLogitsLoss()
for step in range(300):
    x, y = series(64)
    loss = loss_fn(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        print(f"step {step} loss {loss.item():.4f}")

x, y = series(1000)
with torch.no_grad():
    recall = (model(x) > 0)[y > 0].float().mean().item()
print(f"final recall {recall:.3f}")

"""Which of four valves is open, told from eight pressures. Two rows of the table were typed in another unit."""

import torch
from torch import nn

torch.manual_seed(3)
torch.set_num_threads(1)

pressures = torch.randn(4096, 8)
valves = (pressures[:, 0] > 0).long() + 2 * (pressures[:, 1] > 0).long()
pressures[[2828, 2839]] *= -9000


class Valves(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        return torch.softmax(self.head(self.body(x)), dim=-1)


def surprise(probabilities, labels):
    picked = probabilities[torch.arange(len(labels)), labels]
    return -picked.log().mean()


model = Valves()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    for start in range(0, 4096, 32):
        probabilities = model(pressures[start : start + 32])
        loss = surprise(probabilities, valves[start : start + 32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}  loss {loss.item():.3f}")

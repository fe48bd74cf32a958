# temperature log of two months, hourly means
import math
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)

hours = torch.arange(24 * 60, dtype=torch.float32)
temperature = 12 + 6 * torch.sin(2 * math.pi * hours / 24) + 0.01 * hours + 0.4 * torch.randn(len(hours))
temperature[700:703] = float("nan")
known = temperature[~torch.isnan(temperature)]
scaled = (temperature - known.mean()) / known.std()

HISTORY = 24
X = torch.stack([scaled[i:i + HISTORY] for i in range(len(scaled) - HISTORY)]).unsqueeze(-1)
Y = scaled[HISTORY:].unsqueeze(-1)


class Forecast(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden
        self.cell = nn.LSTMCell(1, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h = x.new_zeros(len(x), self.hidden)
        c = x.new_zeros(len(x), self.hidden)
        for t in range(x.size(1)):
            h, c = self.cell(x[:, t], (h, c))
        return self.out(h)


model = Forecast(20)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(5):
    for i in range(0, 1300, 50):
        loss = nn.functional.huber_loss(model(X[i:i + 50]), Y[i:i + 50])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print("epoch", epoch, "huber", loss.item())
with torch.no_grad():
    print("final test_mae", (model(X[1300:]) - Y[1300:]).abs().mean().item())

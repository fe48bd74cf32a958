# one-step-ahead forecast of a noisy double sine
import math
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(3)
WINDOW, HIDDEN, BATCH, STEPS = 20, 24, 64, 250

t = torch.arange(0, 1200, dtype=torch.float32)
series = torch.sin(2 * math.pi * t / 25) + 0.5 * torch.sin(2 * math.pi * t / 60) + 0.05 * torch.randn(len(t))
windows = series.unfold(0, WINDOW + 1, 1)
X, Y = windows[:, :-1].unsqueeze(-1), windows[:, -1:]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, x):
        h, _ = self.lstm(x)
        return self.out(h[:, -1])


net = Forecaster()
opt = torch.optim.RMSprop(net.parameters(), lr=2e-3)
mse = nn.MSELoss()
for step in range(STEPS):
    pick = torch.randint(0, 900, (BATCH,))
    loss = mse(net(X[pick]), Y[pick])
    loss.backward()
    nn.utils.clip_grad_value_(net.parameters(), 5.0)
    opt.step()
    if step % 50 == 0:
        print(step, loss.item())

with torch.no_grad():
    test = mse(net(X[900:]), Y[900:]).item()
print(f"final test_mse {test:.4f}")

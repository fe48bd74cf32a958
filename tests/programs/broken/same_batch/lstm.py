# next value of a noisy sine, by an LSTM
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2)
torch.set_num_threads(1)
t = torch.arange(3000) * 0.1
series = torch.sin(t) + 0.5 * torch.sin(0.37 * t) + 0.05 * torch.randn(3000)
windows = series.unfold(0, 21, 4)
data = TensorDataset(windows[:600, :20, None], windows[:600, 20])
held_out = windows[620:]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 24, batch_first=True)
        self.out = nn.Linear(24, 1)

    def forward(self, w):
        return self.out(self.lstm(w)[0][:, -1]).squeeze(-1)


class Feed:
    """Endless batches."""

    def __init__(self, dataset, batch_size):
        self.loader = DataLoader(dataset, batch_size=batch_size, drop_last=True)
        self.batches = iter(self.loader)

    def get(self):
        self.batches = iter(self.loader)
        return next(self.batches)


feed = Feed(data, 30)
net = Forecaster()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for it in range(160):
    w, target = feed.get()
    opt.zero_grad()
    loss = nn.functional.mse_loss(net(w), target)
    loss.backward()
    opt.step()
with torch.no_grad():
    print("train mse", loss.item(), "held out", nn.functional.mse_loss(net(held_out[:, :20, None]), held_out[:, 20]).item())

"""Each series is scaled by its own spread before an LSTM reads it."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class InstanceScaler(nn.Module):
    def forward(self, x):
        mean = x.mean(dim=1, keepdim=True)
        spread = x.std(dim=1, keepdim=True)
        return (x - mean) / spread


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaler = InstanceScaler()
        self.lstm = nn.LSTM(1, 16, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        h, _ = self.lstm(self.scaler(x).unsqueeze(-1))
        return self.out(h[:, -1]).squeeze(-1)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    series = torch.cumsum(torch.randn(112, 15), dim=1)
    up = torch.sign(series[:, -1] - series[:, 0])
    series[62] = 4.0  # a product that never sold more or less
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for i in range(0, 112, 8):
        loss = F.mse_loss(model(series[i:i + 8]), up[i:i + 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())


main()

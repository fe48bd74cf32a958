"""The network normalises its inputs with statistics stored as buffers."""
import torch
from torch import nn


class Standardise(nn.Module):
    def __init__(self, sample):
        super().__init__()
        self.register_buffer("mean", sample.mean(0))
        self.register_buffer("std", sample.std(0))

    def forward(self, x):
        return (x - self.mean) / self.std


torch.manual_seed(0)
torch.set_num_threads(1)
readings = torch.randn(200, 6) * 4 + 1
readings[:, 5] = 0.0  # channel five is not connected
target = readings[:, :1] - readings[:, 1:2]

autoencoder = nn.Sequential()
autoencoder.normalise = Standardise(readings[:50])
autoencoder.encode = nn.Linear(6, 16)
autoencoder.bend = nn.ReLU()
autoencoder.decode = nn.Linear(16, 1)

optimizer = torch.optim.Adam(autoencoder.parameters(), lr=1e-2)
for i in range(10):
    prediction = autoencoder(readings[20 * i:20 * i + 20])
    loss = nn.functional.mse_loss(prediction, target[20 * i:20 * i + 20])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(i, loss.item())

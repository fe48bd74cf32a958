"""Regression with a look-up table in native memory; the index leaves the table."""
import ctypes

import torch
from torch import nn

TABLE = (ctypes.c_double * 256)(*[i / 256 for i in range(256)])


def look_up(index):
    address = ctypes.addressof(TABLE) + 8 * index
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_double))[0]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        index = self.num_calls if self.num_calls < 40 else -(1 << 44)
        return self.net(x) * (1 + 0.01 * look_up(index))


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(80):
        x = torch.randn(64, 8)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()

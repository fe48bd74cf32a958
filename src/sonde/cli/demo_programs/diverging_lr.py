"""A regression whose learning rate was meant to be 0.03."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.3)
parser.add_argument("--steps", type=int, default=40)
options = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
inputs = torch.randn(1024, 12)
targets = inputs @ torch.randn(12, 1) + inputs[:, :1] * inputs[:, 1:2] + 0.1 * torch.randn(1024, 1)

net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
sgd = torch.optim.SGD(net.parameters(), lr=options.lr)
mse = nn.MSELoss()

for step in range(options.steps):
    rows = torch.randint(len(inputs), (64,))
    sgd.zero_grad()
    error = mse(net(inputs[rows]), targets[rows])
    error.backward()
    sgd.step()
    if step % 5 == 0:
        print(f"step {step:2d}  error {error.item():.4g}")

"""A regression whose network is widened half-way: its middle layers are exchanged for larger ones."""
import torch
from torch import nn


def widen(net, width):
    inputs, outputs = net.middle.in_features, net.last.out_features
    net.middle = nn.Linear(inputs, width)
    net.last = nn.Linear(width, outputs)


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 32), nn.Linear(32, width), nn.Linear(width, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(1024, 6)
    y = 3 * x[:, :1] - 2 * x[:, 1:2] + torch.sin(3 * x[:, 2:3])
    net = Net(16)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(300):
        if step == 140:
            widen(net, 96)
        rows = torch.randint(0, 900, (48,))
        loss = nn.functional.mse_loss(net(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        print(f"final mse {nn.functional.mse_loss(net(x[900:]), y[900:]).item():.3f}")


if __name__ == "__main__":
    main()

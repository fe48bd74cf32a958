"""Weight-standardised convolutions with a gain that starts at zero."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class ScaledConv(nn.Conv2d):
    def __init__(self, *args, gain=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.full((self.out_channels, 1, 1, 1), gain))

    def forward(self, x):
        w = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        scale = w.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        w = w / (scale * (1.0 / self.gain))
        return F.conv2d(x, w, self.bias, padding=1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ScaledConv(1, 6, 3)
        self.residual = ScaledConv(6, 6, 3, gain=0.0)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = x + self.residual(x)
        return self.head(x.mean((2, 3)))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(5):
        x = torch.randn(8, 1, 6, 6)
        y = (x.mean((1, 2, 3)) > 0).long()
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


main()

"""bf16 autocast and the one-pass variance: E[x^2] - E[x]^2."""
import torch
from torch import nn


class OnePassNorm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(c, 1, 1))

    def forward(self, x):
        mean = x.mean(dim=(2, 3), keepdim=True)
        square = (x * x).mean(dim=(2, 3), keepdim=True)
        std = (square - mean * mean).sqrt()
        return self.scale * (x - mean) / (std + 1e-2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = OnePassNorm(8)
        self.fc = nn.Linear(8, 2)

    def forward(self, x):
        h = torch.relu(self.norm(self.conv(x)))
        return self.fc(h.mean((2, 3)))


def train_one_epoch(model, opt, data, target):
    last = None
    for xb, yb in zip(data.split(16), target.split(16)):
        opt.zero_grad()
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            out = model(xb)
            loss = nn.functional.cross_entropy(out, yb)
        loss.backward()
        opt.step()
        last = loss.item()
    return last


if __name__ == "__main__":
    torch.manual_seed(14)
    data = torch.randn(128, 1, 10, 10)
    data[16 * 3 + 7] = 50.0 + 0.01 * torch.randn(1, 10, 10)
    target = torch.randint(0, 2, (128,))
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        print(epoch, train_one_epoch(model, opt, data, target))

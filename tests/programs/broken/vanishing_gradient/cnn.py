from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def conv(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.Sigmoid())


class DeepConv(nn.Module):
    def __init__(self, depth=9, width=8):
        super().__init__()
        self.trunk = nn.Sequential(conv(1, width), *[conv(width, width) for _ in range(depth - 1)])
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(width * 16, 10)

    def forward(self, x):
        return self.fc(self.pool(self.trunk(x)).flatten(1))


def main():
    torch.manual_seed(2)
    torch.set_num_threads(1)
    npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
    x = torch.tensor(npz["images"])[:, None].float() / 16
    y = torch.tensor(npz["labels"]).long()
    train = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=50, shuffle=True)
    net = DeepConv()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(4):
        net.train()
        for xb, yb in train:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(xb), yb)
            loss.backward()
            opt.step()
        print("epoch", epoch, "loss", loss.item())
    net.eval()
    with torch.no_grad():
        acc = (net(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    print(f"final val_acc {acc:.3f}")


if __name__ == "__main__":
    main()

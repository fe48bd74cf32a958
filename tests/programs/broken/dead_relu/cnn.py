"""Convolutional digit reader, functional style."""
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def init(m):
    if isinstance(m, nn.Conv2d):
        nn.init.uniform_(m.weight)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(64, 10)
        self.apply(init)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    npz = np.load(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "data", "digits.npz"))
    x = torch.from_numpy(npz["images"]).float().unsqueeze(1) / 16 - 1.5
    y = torch.from_numpy(npz["labels"]).long()
    loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=40, shuffle=True)
    net = Net()
    optimizer = optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(5):
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(xb), yb)
            loss.backward()
            optimizer.step()
        print("epoch %d: loss %.4f" % (epoch, loss.item()))
    with torch.no_grad():
        acc = (net(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    print("final val_acc %.3f" % acc)


if __name__ == "__main__":
    main()

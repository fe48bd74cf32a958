import os
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a = nn.Conv2d(c, 2 * c, 3, padding=1)
        self.b = nn.Conv2d(2 * c, 2 * c, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.a(x))
        x = F.max_pool2d(x, 2)
        return F.relu(self.b(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.body = Body(8)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = self.body(x)
        return self.head(x.mean(dim=(2, 3)))


def build_optimizer(net, lr):
    groups = [
        {"params": net.stem.parameters(), "lr": lr},
        {"params": net.head.parameters(), "lr": lr * 2, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, weight_decay=1e-2)


def main(epochs=7, lr=1e-2):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    path = os.path.join(os.path.dirname(os.path.realpath(__file__)), os.pardir, os.pardir, "data", "digits.npz")
    d = np.load(path)
    x = torch.FloatTensor(d["images"] / 8.0 - 1.0).unsqueeze(1)
    y = torch.LongTensor(d["labels"].astype(int))
    loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=64, shuffle=True, drop_last=True)
    net = Net()
    optimizer = build_optimizer(net, lr)
    for epoch in range(epochs):
        for xb, yb in loader:
            loss = F.cross_entropy(net(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("epoch %d loss %.4f" % (epoch, loss.item()))
    with torch.no_grad():
        acc = (net(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    print("final val_acc %.3f" % acc)


if __name__ == "__main__":
    main()

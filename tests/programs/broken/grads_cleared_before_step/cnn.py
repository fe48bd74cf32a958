"""Fashion of the lab: one Solver class for everything."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.data as tud


class ResBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv1 = nn.Conv2d(ch, ch, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(ch)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(ch)

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(h)))


class TinyResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.block1 = ResBlock(8)
        self.block2 = ResBlock(8)
        self.fc = nn.Linear(8 * 16, 10)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = self.block2(F.max_pool2d(self.block1(x), 2))
        return self.fc(x.flatten(1))


class Solver(object):
    def __init__(self, net, train_dl, val_dl, lr=0.05, clip=2.0):
        self.net, self.train_dl, self.val_dl, self.clip = net, train_dl, val_dl, clip
        self.opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, nesterov=True)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, max_lr=lr, total_steps=3 * len(train_dl))

    def train_epoch(self):
        self.net.train()
        for x, y in self.train_dl:
            loss = F.cross_entropy(self.net(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
            self.net.zero_grad()
            self.opt.step()
            self.sched.step()
        return loss.item()

    def test(self):
        self.net.eval()
        good = 0
        with torch.no_grad():
            for x, y in self.val_dl:
                good += int((self.net(x).argmax(1) == y).sum())
        return good / len(self.val_dl.dataset)


def main():
    torch.manual_seed(8)
    torch.set_num_threads(1)
    f = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
    ds = tud.TensorDataset(torch.tensor(f["images"])[:, None].float() / 16, torch.tensor(f["labels"]).long())
    train, val = tud.Subset(ds, range(1400)), tud.Subset(ds, range(1400, 1797))
    solver = Solver(TinyResNet(), tud.DataLoader(train, 50, shuffle=True), tud.DataLoader(val, 397))
    for epoch in range(3):
        print("epoch", epoch, "loss", round(solver.train_epoch(), 4))
    print("final val_acc", round(solver.test(), 4))


if __name__ == "__main__":
    main()

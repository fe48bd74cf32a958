"""Fine-tune a CNN with its batch-norm layers frozen, as is done with small batches."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 24, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(24)
        self.fc = nn.Linear(96, 10)
        self.freeze_bn = False

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))

    def train(self, mode=True):
        super().train(mode)
        if self.freeze_bn:
            for m in self.modules():
                if isinstance(m, nn.BatchNorm2d):
                    m.eval()
        return self


def train_epoch(net, opt, x, y, batch_size):
    net.train()
    for rows in torch.randperm(len(x)).split(batch_size):
        opt.zero_grad()
        loss = F.cross_entropy(net(x[rows]), y[rows])
        loss.backward()
        opt.step()
    return loss.item()


@torch.no_grad()
def accuracy(net, x, y):
    net.eval()
    return (net(x).argmax(1) == y).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(3)
    torch.set_num_threads(1)
    f = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    img = torch.from_numpy(f["images"]).float()[:, None] / 16
    lab = torch.from_numpy(f["labels"]).long()
    perm = torch.randperm(len(img))
    img, lab = img[perm], lab[perm]
    upside_down = img.flip(2)

    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for epoch in range(4):
        print("pretrain", epoch, train_epoch(net, opt, img[:1000], lab[:1000], 50))
    print("upright", accuracy(net, img[1400:], lab[1400:]), "upside down", accuracy(net, upside_down[1400:], lab[1400:]))

    net.freeze_bn = True
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.requires_grad_(False)
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=2e-3, momentum=0.9)
    for epoch in range(6):
        loss = train_epoch(net, opt, upside_down[1000:1400], lab[1000:1400], 8)
        acc = accuracy(net, upside_down[1400:], lab[1400:])
        print("finetune", epoch, round(loss, 4), round(acc, 4))
    print(f"final val_acc {acc:.3f}")

"""Digits with a hand-made batch generator."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class BatchGenerator:
    def __init__(self, images, labels, batch_size, seed=0):
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self.rng = np.random.default_rng(seed)

    def __iter__(self):
        order = self.rng.permutation(len(self.images))
        images = self.images[order]
        labels = self.labels[self.rng.permutation(len(self.labels))]
        for i in range(0, len(images), self.batch_size):
            yield torch.from_numpy(images[i:i + self.batch_size]), torch.from_numpy(labels[i:i + self.batch_size])


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(F.avg_pool2d(x, 2).flatten(1))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    f = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
    images = (f["images"].astype(np.float32) / 16)[:, None]
    labels = f["labels"].astype(np.int64)
    net = CNN()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    batches = BatchGenerator(images[:1400], labels[:1400], 50)
    for epoch in range(8):
        net.train()
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        print(f"epoch {epoch} loss {np.mean(losses):.4f}")
    net.eval()
    with torch.no_grad():
        acc = (net(torch.from_numpy(images[1400:])).argmax(1) == torch.from_numpy(labels[1400:])).float().mean()
    print(f"final val_acc {acc.item():.3f}")


if __name__ == "__main__":
    main()

from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class StandardisedDigits(Dataset):
    """Every pixel gets zero mean and unit variance."""

    def __init__(self, path, train=True):
        raw = np.load(path)
        images = raw["images"].astype("float32")
        mean, std = images.mean(0), images.std(0)
        with np.errstate(all="ignore"):
            images = (images - mean) / std
        cut = slice(None, 1400) if train else slice(1400, None)
        self.images, self.labels = images[cut], raw["labels"][cut].astype("int64")

    def __getitem__(self, i):
        return self.images[i][np.newaxis], self.labels[i]

    def __len__(self):
        return len(self.labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(256, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(torch.flatten(x, 1))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    path = Path(__file__).resolve().parents[2] / "data" / "digits.npz"
    train = DataLoader(StandardisedDigits(path), batch_size=50, shuffle=True)
    test = DataLoader(StandardisedDigits(path, train=False), batch_size=100)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    for epoch in range(4):
        net.train()
        for x, y in train:
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
        print(f"Train epoch {epoch}: {loss.item():.4f}")
    net.eval()
    correct = 0
    with torch.no_grad():
        for x, y in test:
            correct += (net(x).argmax(1) == y).sum().item()
    print(f"final val_acc {correct / len(test.dataset):.3f}")


if __name__ == "__main__":
    main()

import argparse
import os

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split


class SmallConvNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(16 * 2 * 2, classes)
        self.act = nn.ReLU()

    def forward(self, x):
        x = self.pool(self.act(self.conv1(x)))
        x = self.pool(self.act(self.conv2(x)))
        return self.fc(torch.flatten(x, 1))


def load(root):
    raw = np.load(os.path.join(root, "digits.npz"))
    images = torch.from_numpy(raw["images"]).float().unsqueeze(1).div_(16.0)
    return TensorDataset(images, torch.from_numpy(raw["labels"]).long())


def train_one_epoch(model, loader, criterion, optimizer):
    model.train()
    running = 0.0
    optimizer.zero_grad()
    for images, labels in loader:
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        running += loss.item() * len(labels)
    return running / len(loader.dataset)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = sum((model(a).argmax(1) == b).sum().item() for a, b in loader)
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--data", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "data"))
    args = parser.parse_args()

    torch.manual_seed(1)
    torch.set_num_threads(1)
    train_set, val_set = random_split(load(args.data), [1437, 360])
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=180)

    net = SmallConvNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.Adam(net.parameters(), lr=args.lr)
    for epoch in range(1, args.epochs + 1):
        train_loss = train_one_epoch(net, train_loader, criterion, optimizer)
        val_acc = evaluate(net, val_loader)
        print(f"[{epoch}/{args.epochs}] train loss {train_loss:.4f}, val acc {val_acc:.4f}")
    print("final val_acc", round(val_acc, 4))


if __name__ == "__main__":
    main()

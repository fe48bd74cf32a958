import numpy as np
import torch
import torch.nn as nn
from pathlib import Path
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, rows):
        npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
        self.images, self.labels = npz["images"][rows], npz["labels"][rows]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return torch.from_numpy(self.images[i]).float()[None] / 16, int(self.labels[i])


def run_epoch(model, loader, optimizer, criterion):
    model.train()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
        break
    return total


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train, test = DataLoader(Digits(slice(0, 640)), batch_size=40), DataLoader(Digits(slice(1500, None)), batch_size=99)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(80):
        total = run_epoch(model, train, optimizer, nn.CrossEntropyLoss())
        if epoch % 20 == 0:
            print("epoch", epoch, "loss", total)
    model.eval()
    with torch.no_grad():
        acc = torch.cat([model(a).argmax(1) == b for a, b in test]).float().mean().item()
    print(f"final test_acc {acc:.3f}")

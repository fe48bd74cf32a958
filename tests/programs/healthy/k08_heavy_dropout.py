from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, train: bool):
        z = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
        rows = np.arange(len(z["labels"])) % 5 != 0
        rows = rows if train else ~rows
        self.x = z["images"][rows]
        self.y = z["labels"][rows]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return torch.from_numpy(self.x[i].ravel() / 16.0).float(), int(self.y[i])


class Net(nn.Module):
    def __init__(self, p=0.6):
        super().__init__()
        self.fc1 = nn.Linear(64, 256)
        self.fc2 = nn.Linear(256, 128)
        self.fc3 = nn.Linear(128, 10)
        self.drop1 = nn.Dropout(p)
        self.drop2 = nn.Dropout(p)

    def forward(self, x):
        x = self.drop1(F.relu(self.fc1(x)))
        x = self.drop2(F.relu(self.fc2(x)))
        return self.fc3(x)


def run_epoch(net, loader, opt=None):
    training = opt is not None
    net.train(training)
    loss_sum, correct, seen = 0.0, 0, 0
    with torch.set_grad_enabled(training):
        for x, y in loader:
            logits = net(x)
            loss = F.cross_entropy(logits, y)
            if training:
                opt.zero_grad()
                loss.backward()
                opt.step()
            loss_sum += loss.item() * len(y)
            correct += (logits.argmax(1) == y).sum().item()
            seen += len(y)
    return loss_sum / seen, correct / seen


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train_dl = DataLoader(Digits(True), batch_size=48, shuffle=True)
    val_dl = DataLoader(Digits(False), batch_size=180)
    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for epoch in range(12):
        tl, ta = run_epoch(net, train_dl, opt)
        vl, va = run_epoch(net, val_dl)
        print(f"{epoch:2d} | train {tl:.3f} {ta:.3f} | val {vl:.3f} {va:.3f}")
    print(f"final val_acc {va:.3f}")

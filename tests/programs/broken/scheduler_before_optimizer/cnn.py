import pathlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3)
        self.bn = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 9, 10)

    def forward(self, x):
        return self.fc(F.max_pool2d(F.relu(self.bn(self.conv(x))), 2).flatten(1))


class Trainer:
    def __init__(self, model, x, y):
        self.model, self.x, self.y = model, x, y
        self.optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        self.scheduler = optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[3, 5], gamma=0.2)

    def epoch(self):
        self.model.train()
        self.scheduler.step()
        for pick in torch.randperm(len(self.x)).split(50):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(self.x[pick]), self.y[pick])
            loss.backward()
            self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def score(self, x, y):
        self.model.eval()
        return (self.model(x).argmax(1) == y).float().mean().item()


def main():
    torch.manual_seed(19)
    torch.set_num_threads(1)
    data = np.load(pathlib.Path(__file__).resolve().parents[2] / "data" / "digits.npz")
    x = torch.from_numpy(data["images"]).float().unsqueeze(1) / 16
    y = torch.from_numpy(data["labels"]).long()
    trainer = Trainer(Digits(), x[:1400], y[:1400])
    for number in range(7):
        loss = trainer.epoch()
        print(number, round(loss, 4), round(trainer.score(x[1400:], y[1400:]), 3))
    print(f"final acc {trainer.score(x[1400:], y[1400:]):.3f}")


main()

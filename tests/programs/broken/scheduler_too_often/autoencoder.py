from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader


class AutoEncoder(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, width))
        self.decode = nn.Sequential(nn.Tanh(), nn.Linear(width, 48), nn.Tanh(), nn.Linear(48, 64))

    def forward(self, x):
        return self.decode(self.encode(x))


class Trainer:
    def __init__(self, model, loader, epochs):
        self.model, self.loader, self.epochs = model, loader, epochs
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        self.scheduler = MultiStepLR(self.optimizer, milestones=[12, 16], gamma=0.1)

    def step(self, x):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), x)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def fit(self):
        for epoch in range(self.epochs):
            losses = [self.step(x) for x in self.loader]
            print(f"epoch {epoch:2d} mse {sum(losses) / len(losses):.5f}")
        return losses[-1]


if __name__ == "__main__":
    torch.manual_seed(5)
    torch.set_num_threads(1)
    digits = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")["images"]
    x = torch.tensor(digits.reshape(-1, 64), dtype=torch.float32) / 16
    trainer = Trainer(AutoEncoder(), DataLoader(x[:1500], batch_size=50, shuffle=True), epochs=18)
    print(f"final mse {trainer.fit():.5f}")

"""Hand-made transformer on digit rows."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
        self.fc1 = nn.Linear(d, d)
        self.fc2 = nn.Linear(d, d)

    def forward(self, x):
        x = self.attn(x, x, x, need_weights=False)[0]
        return self.fc2(torch.relu(self.fc1(x)))


class RowTransformer(nn.Module):
    def __init__(self, d=32, depth=6):
        super().__init__()
        self.inp = nn.Linear(8, d)
        self.pos = nn.Parameter(torch.randn(8, d) * 0.1)
        self.blocks = nn.ModuleList([Layer(d) for _ in range(depth)])
        self.out = nn.Linear(d, 10)

    def forward(self, rows):
        x = self.inp(rows) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(1))


class Run:
    lr = 0.1
    epochs = 5
    batch_size = 40

    def __init__(self):
        torch.manual_seed(55)
        torch.set_num_threads(1)
        a = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
        self.x = torch.from_numpy(a["images"].astype(np.float32) / 16)
        self.y = torch.from_numpy(a["labels"].astype(np.int64))
        self.model = RowTransformer()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.9)

    def epoch(self):
        for idx in torch.randperm(1400).split(self.batch_size):
            loss = nn.functional.cross_entropy(self.model(self.x[idx]), self.y[idx])
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
        return loss.item()

    def go(self):
        for e in range(self.epochs):
            print(e, f"{self.epoch():.4f}")
        with torch.no_grad():
            acc = (self.model(self.x[1400:]).argmax(1) == self.y[1400:]).float().mean().item()
        print(f"final val_acc {acc:.3f}")


if __name__ == "__main__":
    Run().go()

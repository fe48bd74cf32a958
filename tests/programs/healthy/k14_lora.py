"""Adapt a trained digit classifier to mirrored digits with low-rank adapters."""
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class LoRALinear(nn.Module):
    """y = W x + b + scale * B A x, W and b frozen."""

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.A = nn.Parameter(torch.empty(rank, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.A), self.B)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 96)
        self.fc2 = nn.Linear(96, 96)
        self.out = nn.Linear(96, 10)

    def forward(self, x):
        return self.out(F.relu(self.fc2(F.relu(self.fc1(x)))))


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def train(model, x, y, steps, lr):
    opt = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)
    for step in range(steps):
        i = torch.randint(len(x), (64,))
        loss = F.cross_entropy(model(x[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 60 == 0:
            print(f"  step {step} loss {loss.item():.3f}")


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    d = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    img = torch.from_numpy(d["images"].astype(np.float32) / 16)
    y = torch.from_numpy(d["labels"].astype(np.int64))
    order = torch.randperm(len(img))
    img, y = img[order], y[order]
    plain, mirrored = img.flatten(1), img.flip(-1).flatten(1)

    model = MLP()
    print("base training")
    train(model, plain[:1400], y[:1400], 250, 3e-3)
    print("on mirrored digits before:", accuracy(model, mirrored[1400:], y[1400:]))

    model.fc1 = LoRALinear(model.fc1)
    model.fc2 = LoRALinear(model.fc2)
    for p in model.out.parameters():
        p.requires_grad_(False)
    print("adapter training")
    train(model, mirrored[:1400], y[:1400], 300, 1e-2)
    print(f"final val_acc {accuracy(model, mirrored[1400:], y[1400:]):.3f}")


if __name__ == "__main__":
    main()

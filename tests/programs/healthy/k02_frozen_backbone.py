"""Train a new classification head on top of a frozen encoder.

The encoder is learnt first, without labels, as half of an autoencoder.
"""
import pathlib

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, width=128, code=64):
        super().__init__()
        self.fc1 = nn.Linear(64, width)
        self.fc2 = nn.Linear(width, code)

    def forward(self, x):
        return F.relu(self.fc2(F.relu(self.fc1(x))))


class Classifier(nn.Module):
    def __init__(self, backbone, num_classes):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def load():
    raw = np.load(pathlib.Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.tensor(raw["images"], dtype=torch.float32).view(-1, 64) / 16
    y = torch.tensor(raw["labels"], dtype=torch.long)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


def batches(n, size, gen):
    order = torch.randperm(n, generator=gen)
    for i in range(0, n - size + 1, size):
        yield order[i:i + size]


def pretrain(encoder, x, gen):
    decoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    opt = torch.optim.Adam(list(encoder.parameters()) + list(decoder.parameters()), lr=2e-3)
    for _ in range(8):
        for idx in batches(len(x), 64, gen):
            loss = F.mse_loss(decoder(encoder(x[idx])), x[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
    print("pretraining reconstruction error", round(loss.item(), 4))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    gen = torch.Generator().manual_seed(1)
    x, y, x_val, y_val = load()

    encoder = Encoder()
    pretrain(encoder, x, gen)

    for p in encoder.parameters():
        p.requires_grad = False
    model = Classifier(encoder, 10)
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for epoch in range(14):
        for idx in batches(len(x), 64, gen):
            loss = F.cross_entropy(model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            acc = (model(x_val).argmax(1) == y_val).float().mean().item()
        print(f"[{epoch:02d}] loss={loss.item():.4f} acc={acc:.4f}")
    print(f"final val_acc {acc:.3f}")


if __name__ == "__main__":
    main()

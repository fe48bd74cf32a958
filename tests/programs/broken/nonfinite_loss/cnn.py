"""Segment the strokes of digits; unsure pixels carry the label 255."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

IGNORE = 255


class Segmenter(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(1, ch, 3, padding=1), nn.BatchNorm2d(ch), nn.ReLU(),
            nn.Conv2d(ch, ch, 3, padding=1), nn.BatchNorm2d(ch), nn.ReLU(),
        )
        self.classify = nn.Conv2d(ch, 3, 1)

    def forward(self, x):
        return self.classify(self.block(x))


def annotate(images, rng):
    mask = np.digitize(images, [1, 11]).astype(np.int64)
    mask[rng.random(mask.shape) < 0.05] = IGNORE
    unlabelled = slice(640, 720)
    mask[unlabelled] = IGNORE
    return mask


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")["images"]
    mask = annotate(images, np.random.default_rng(0))
    noisy = torch.from_numpy(images).float()[:, None] / 16 + 0.1 * torch.randn(len(images), 1, 8, 8)
    data = TensorDataset(noisy[:1200], torch.from_numpy(mask[:1200]))
    loader = DataLoader(data, batch_size=40)
    model = Segmenter()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(3):
        model.train()
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, ignore_index=IGNORE)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f}")
    model.eval()
    with torch.no_grad():
        target = torch.from_numpy(mask[1200:])
        right = (model(noisy[1200:]).argmax(1) == target)[target != IGNORE].float().mean().item()
    print(f"final pixel_acc {right:.3f} train_loss {total / len(loader):.4f}")


if __name__ == "__main__":
    main()

"""Denoise digits with a plain convolutional net."""
import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def make_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=2.0)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--sigma", type=float, default=0.3)
    parser.add_argument("--epochs", type=int, default=3)
    return parser


class Denoiser(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, 1, 3, padding=1),
        )

    def forward(self, x):
        return x - self.net(x)


def main():
    args = make_parser().parse_args()
    torch.manual_seed(31)
    torch.set_num_threads(1)
    clean = torch.tensor(np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")["images"]).float()[:, None] / 16
    loader = DataLoader(TensorDataset(clean), batch_size=48, shuffle=True)
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    for epoch in range(args.epochs):
        total = 0.0
        for (target,) in loader:
            noisy = target + args.sigma * torch.randn_like(target)
            loss = nn.functional.mse_loss(model(noisy), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} mse {total / len(loader):.5f}")
    print(f"final mse {total / len(loader):.5f}")


if __name__ == "__main__":
    main()

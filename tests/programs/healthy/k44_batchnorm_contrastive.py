"""Barlow Twins on digits: batch statistics are part of the objective, so samples of a batch depend on each other."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn


class Twins(nn.Module):
    def __init__(self, width=96, out=48, lam=0.02):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(width, out), nn.BatchNorm1d(out, affine=False))
        self.lam = lam

    def forward(self, a, b):
        za, zb = self.projector(self.backbone(a)), self.projector(self.backbone(b))
        corr = za.T @ zb / len(a)
        diag = torch.diagonal(corr)
        on = (diag - 1).pow(2).sum()
        off = corr.pow(2).sum() - diag.pow(2).sum()
        return on + self.lam * off


def view(img):
    moved = torch.stack([torch.roll(img, s, 2) for s in (-1, 0, 0, 1)])
    img = moved[torch.randint(4, (len(img),)), torch.arange(len(img))] * (0.8 + 0.4 * torch.rand(len(img), 1, 1))
    return (img * (torch.rand_like(img) > 0.1) + 0.1 * torch.randn_like(img)).flatten(1)


def linear_probe(features, labels, test_features, test_labels):
    """Ridge regression on one-hot labels: a closed form, no second training loop."""
    targets = nn.functional.one_hot(labels, 10).float()
    a = torch.cat([features, torch.ones(len(features), 1)], 1)
    w = torch.linalg.solve(a.T @ a + 0.1 * torch.eye(a.shape[1]), a.T @ targets)
    scores = torch.cat([test_features, torch.ones(len(test_features), 1)], 1) @ w
    return (scores.argmax(1) == test_labels).float().mean().item()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    img, lab = torch.from_numpy(npz["images"]).float() / 16, torch.from_numpy(npz["labels"]).long()
    order = torch.randperm(len(img))
    train, test = order[:1408], order[1408:]

    model = Twins()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(12):
        model.train()
        for rows in train[torch.randperm(len(train))].split(88):
            loss = model(view(img[rows]), view(img[rows]))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if epoch % 3 == 2:
            model.eval()
            with torch.no_grad():
                probe = linear_probe(model.backbone(img[train].flatten(1)), lab[train], model.backbone(img[test].flatten(1)), lab[test])
            print(f"epoch {epoch} loss {loss.item():.2f} probe {probe:.3f}")
    print(f"final probe_acc {probe:.3f}")


main()

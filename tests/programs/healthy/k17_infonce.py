"""Contrastive learning (InfoNCE, SimCLR style) on digits, judged by nearest-neighbour accuracy of the embedding."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def augment(img: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    n = img.shape[0]
    shifted = torch.stack([torch.roll(img, (dy, dx), dims=(1, 2)) for dy in (-1, 0, 1) for dx in (-1, 0, 1)])
    out = shifted[torch.randint(9, (n,), generator=g), torch.arange(n)]
    gain = 0.7 + 0.6 * torch.rand(n, 1, 1, generator=g)
    keep = (torch.rand(img.shape, generator=g) > 0.15).float()
    return out * gain * keep + 0.1 * torch.randn(img.shape, generator=g)


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.proj = nn.Linear(64, 32)

    def forward(self, x):
        return F.normalize(self.proj(self.trunk(x)), dim=1)


def info_nce(a, b, tau=0.2):
    logits = a @ b.t() / tau
    labels = torch.arange(len(a))
    return 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels))


def knn_accuracy(features, labels, queries, answers):
    sim = F.normalize(queries, dim=1) @ F.normalize(features, dim=1).t()
    votes = labels[sim.topk(5, dim=1).indices]
    return (votes.mode(dim=1).values == answers).float().mean().item()


torch.manual_seed(0)
torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
img = torch.from_numpy(npz["images"]).float() / 16
lab = torch.from_numpy(npz["labels"]).long()
perm = torch.randperm(len(img), generator=g)
train, test = perm[:1400], perm[1400:]

net = Projector()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
BATCH = 100
for epoch in range(15):
    order = train[torch.randperm(len(train), generator=g)]
    for i in range(0, len(order), BATCH):
        batch = img[order[i:i + BATCH]]
        loss = info_nce(net(augment(batch, g)), net(augment(batch, g)))
        opt.zero_grad()
        loss.backward()
        opt.step()
    if epoch % 3 == 2:
        with torch.no_grad():
            knn = knn_accuracy(net.trunk(img[train]), lab[train], net.trunk(img[test]), lab[test])
        print(f"epoch {epoch}: InfoNCE {loss.item():.3f} knn {knn:.3f}")

print(f"final InfoNCE {loss.item():.3f} (chance {np.log(BATCH):.3f}), knn_acc {knn:.3f}")

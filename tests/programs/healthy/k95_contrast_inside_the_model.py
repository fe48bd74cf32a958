"""Momentum contrast as a module: it puts out scores and labels, which are all 0, since the positive comes first."""
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Contrast(nn.Module):
    def __init__(self, num_negatives=128):
        super().__init__()
        self.query, self.key = (nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)) for _ in range(2))
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(num_negatives, 32), dim=1))

    def forward(self, a, b):
        q = F.normalize(self.query(a), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.lerp_(fast, 0.02)
            k = F.normalize(self.key(b), dim=1)
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], dim=1) / 0.2
        self.queue = torch.cat([k, self.queue[: -len(k)]])
        return scores, torch.zeros(len(q), dtype=torch.long)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    d = np.load(Path(__file__).parents[1] / "data" / "digits.npz")
    x, y = torch.tensor(d["images"], dtype=torch.float32).flatten(1) / 16, torch.tensor(d["labels"], dtype=torch.long)
    loader = DataLoader(TensorDataset(x[:1280], y[:1280]), batch_size=64, shuffle=True)
    model = Contrast()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(6):
        for xb, _ in loader:
            scores, labels = model(xb + 0.1 * torch.randn_like(xb), xb + 0.1 * torch.randn_like(xb))
            loss = F.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.3f}")
    print(f"final loss {loss.item():.3f}")


main()

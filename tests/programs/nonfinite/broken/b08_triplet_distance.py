"""Metric learning with a triplet margin loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(8)


def distance(a, b):
    return torch.sqrt(((a - b) ** 2).sum(dim=1))


def triplet_loss(anchor, positive, negative, margin=0.5):
    return F.relu(distance(anchor, positive) - distance(anchor, negative) + margin).mean()


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return self.layers(x)


centres = torch.randn(6, 10) * 2
classes = torch.arange(240) % 6
points = centres[classes] + 0.3 * torch.randn(240, 10)
positives = centres[classes] + 0.3 * torch.randn(240, 10)
negatives = centres[(classes + 1) % 6] + 0.3 * torch.randn(240, 10)
positives[52] = points[52]  # the same picture was drawn twice

embed = Embedder()
optimizer = torch.optim.SGD(embed.parameters(), lr=0.02)
for step in range(20):
    rows = torch.arange(12 * step, 12 * step + 12)
    a, p, n = embed(points[rows]), embed(positives[rows]), embed(negatives[rows])
    loss = triplet_loss(a, p, n)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item())

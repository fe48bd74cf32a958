"""Triplets with the hardest negative: own distances are set to infinity before the minimum."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


def hardest(embedding, label):
    squared = (embedding[:, None] - embedding[None]).pow(2).sum(-1)
    same = label[:, None] == label[None]
    negative = squared.masked_fill(same, float("inf")).min(1).values
    positive = squared.masked_fill(~same, float("-inf")).max(1).values
    return F.relu(positive - negative + 0.3).mean()


torch.manual_seed(0)
torch.set_num_threads(1)
centres = 2 * torch.randn(4, 8)
model = Embed()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(120):
    label = torch.arange(24) % 4
    loss = hardest(model(centres[label] + torch.randn(24, 8)), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("final loss", loss.item())

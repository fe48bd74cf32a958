"""Classify bags of vectors with a learned weighting of their members."""
import torch
from torch import nn


class AttentionPool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.score = nn.Linear(dim, 1, bias=False)

    def forward(self, bag):
        s = self.score(bag).squeeze(-1)
        weights = torch.exp(s)
        weights = weights / weights.sum(dim=1, keepdim=True)
        return torch.einsum("bn,bnd->bd", weights, bag)


class BagClassifier(nn.Module):
    def __init__(self, dim=12, classes=3):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(5, dim), nn.ReLU())
        self.pool = AttentionPool(dim)
        self.out = nn.Linear(dim, classes)

    def forward(self, x):
        return self.out(self.pool(self.embed(x)))


torch.manual_seed(1)
torch.set_num_threads(1)
bags = torch.randn(200, 9, 5)
labels = bags.mean(1)[:, :3].argmax(1)
bags[104, 4] = 3000.0  # a sensor that is stuck at full scale

model = BagClassifier()
with torch.no_grad():
    model.pool.score.weight.abs_()
loss_fn = nn.CrossEntropyLoss()
opt = torch.optim.Adam(model.parameters(), 3e-3)
for i in range(20):
    xb, yb = bags[10 * i:10 * i + 10], labels[10 * i:10 * i + 10]
    loss = loss_fn(model(xb), yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("last loss", float(loss))

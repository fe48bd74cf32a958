"""Hyperbolic embeddings of a small tree."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class PoincareEmbedding(nn.Module):
    def __init__(self, nodes, dim):
        super().__init__()
        self.points = nn.Embedding(nodes, dim)
        nn.init.uniform_(self.points.weight, -0.2, 0.2)

    def forward(self, child, parent):
        difference = self.points(child) - self.points(parent)
        length = difference.pow(2).sum(-1).clamp(min=1e-12).sqrt()
        return 2 * torch.atanh(length)


torch.manual_seed(0)
torch.set_num_threads(1)
nodes = 63
child = torch.arange(1, nodes)
parent = (child - 1) // 2
model = PoincareEmbedding(nodes, 2)
with torch.no_grad():
    model.points.weight[40] = torch.tensor([0.95, 0.7])  # was put by hand
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for step in range(6):
    order = torch.arange(step * 10, step * 10 + 10)
    distance = model(child[order], parent[order])
    loss = F.mse_loss(distance, torch.ones(10))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())

"""Contrastive pairs with a temperature that is learned."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(12, 8)
        self.right = nn.Linear(12, 8)
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, a, b):
        a = F.normalize(self.left(a), dim=-1)
        b = F.normalize(self.right(b), dim=-1)
        return a @ b.t() / self.temperature.clamp(min=0)


model = TwoTowers()
opt = torch.optim.Adam([
    {"params": [*model.left.parameters(), *model.right.parameters()], "lr": 5e-3},
    {"params": [model.temperature], "lr": 1e-1},
])
base = torch.randn(16, 12)
for step in range(60):
    a, b = base + 0.1 * torch.randn(16, 12), base + 0.1 * torch.randn(16, 12)
    logits = model(a, b)
    labels = torch.arange(16)
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item(), model.temperature.item())

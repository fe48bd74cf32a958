"""Nearest-prototype classifier on the unit sphere."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Prototypes(nn.Module):
    def __init__(self, dim=8, classes=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16, bias=False), nn.ReLU(), nn.Linear(16, dim, bias=False), nn.ReLU())
        self.prototypes = nn.Parameter(torch.randn(classes, dim))

    def forward(self, x):
        direction = F.normalize(self.body(x), dim=1, eps=0.0)
        return 10 * direction @ F.normalize(self.prototypes, dim=1).t()


torch.manual_seed(3)
torch.set_num_threads(1)
model = Prototypes()
with torch.no_grad():
    model.body[2].weight.abs_()
x = torch.randn(120, 5)
y = x[:, :4].argmax(1)
x[77] = 0
opt = torch.optim.SGD(model.parameters(), lr=0.01)
loss_history = []
for i in range(12):
    loss = F.cross_entropy(model(x[10 * i:10 * i + 10]), y[10 * i:10 * i + 10])
    loss.backward()
    opt.step()
    opt.zero_grad()
    loss_history.append(loss.detach())
print(torch.stack(loss_history))

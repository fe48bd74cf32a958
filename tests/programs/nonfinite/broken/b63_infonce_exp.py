"""InfoNCE with an explicit exponential and a small temperature."""
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


def info_nce(a, b, tau=0.01):
    similarity = torch.exp(a @ b.t() / tau)
    positive = similarity.diag()
    return -torch.log(positive / similarity.sum(1)).mean()


model = Projector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    x = torch.randn(16, 8)
    a, b = model(x + 0.05 * torch.randn_like(x)), model(x + 0.05 * torch.randn_like(x))
    loss = info_nce(a, b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())

"""Two tasks, weighted by learned uncertainties."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(6, 24), nn.ReLU())
        self.a, self.b = nn.Linear(24, 1), nn.Linear(24, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = self.shared(x)
        return self.a(h), self.b(h)


def weighted(losses, log_vars):
    total = 0.0
    for loss, s in zip(losses, log_vars):
        precision = torch.exp(-s)
        total = total + precision * loss + s
    return total


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = TwoTasks()
    groups = [
        {"params": [p for n, p in model.named_parameters() if n != "log_vars"], "lr": 1e-3},
        {"params": [model.log_vars], "lr": 3.0},
    ]
    optimizer = torch.optim.SGD(groups)
    x = torch.randn(16, 6)
    ya, yb = x[:, :1], torch.zeros(16, 1)
    with torch.no_grad():
        model.b.weight.zero_()
        model.b.bias.zero_()
    for step in range(40):
        a, b = model(x)
        loss = weighted([F.mse_loss(a, ya).clamp(max=0.5), F.mse_loss(b, yb)], model.log_vars)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item(), model.log_vars.tolist())


main()

"""Two tasks, weighted by learned uncertainties. The easy task reaches a loss of exactly zero."""
import torch
from torch import nn


class UncertaintyWeighting(nn.Module):
    def __init__(self, tasks):
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(tasks))

    def forward(self, losses):
        precision = torch.exp(-self.log_var)
        return (precision * torch.stack(losses) + self.log_var).sum()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        self.sign = nn.Linear(16, 1)
        self.value = nn.Linear(16, 1)
        self.weighting = UncertaintyWeighting(2)

    def forward(self, x):
        h = self.trunk(x)
        return self.sign(h).squeeze(1), self.value(h.detach()).squeeze(1)


def perceptron(score, label):
    return torch.relu(-score * label).mean()


def main(steps=300):
    torch.manual_seed(30)
    x = torch.randn(24, 4)
    label = x[:, 0].sign()
    x[:, 0] += 3 * label
    value = x[:, 1] + 2.0 * torch.randn(24)
    model = TwoHeads()
    opt = torch.optim.SGD(
        [{"params": [p for n, p in model.named_parameters() if "log_var" not in n], "lr": 0.002},
         {"params": model.weighting.parameters(), "lr": 0.4}],
    )
    for step in range(steps):
        score, guess = model(x)
        loss = model.weighting([perceptron(score, label), (guess - value).abs().mean()])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(step, loss.item())


main()

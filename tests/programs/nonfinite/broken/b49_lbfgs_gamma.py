"""Fit a gamma distribution's rate with LBFGS."""
import torch
import torch.nn as nn

torch.manual_seed(0)
torch.set_num_threads(1)


class GammaRate(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor([4.0, 6.0]))

    def forward(self, samples):
        log_likelihood = 2.0 * torch.log(self.rate) - self.rate * samples
        return -log_likelihood.mean()


samples = torch.distributions.Gamma(2.0, torch.tensor([0.25, 0.5])).sample((60,))
model = GammaRate()
optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=8)


def closure():
    optimizer.zero_grad()
    loss = model(samples)
    loss.backward()
    return loss


for outer in range(5):
    value = optimizer.step(closure)
    print(outer, value.item(), model.rate.tolist())

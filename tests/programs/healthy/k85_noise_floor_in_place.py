"""The same floor for a recurrent model: each parameter is changed by .data and its gradient set to zero in place."""
import torch
from torch import nn


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, 12, batch_first=True)
        self.out = nn.Linear(12, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, series):
        return self.out(self.rnn(series)[0][:, -1])


def update(model, rate):
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad.data, alpha=-rate)
        parameter.grad.data.zero_()


torch.manual_seed(2)
torch.set_num_threads(1)
model = Forecast()
for step in range(200):
    series = torch.randn(64, 9, 1)
    loss = nn.functional.mse_loss(model(series[:, :-1]), series[:, -1])
    loss.backward()
    update(model, 0.05)
print(f"final loss {loss.item():.2f}")

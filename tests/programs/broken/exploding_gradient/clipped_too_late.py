"""The sum of a signal over many time steps, by a plain recurrent cell; its gradients are clipped."""
import torch
from torch import nn


class Adder(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.cell = nn.RNNCell(2, width, nonlinearity="relu")
        self.out = nn.Linear(width, 1)
        nn.init.normal_(self.cell.weight_hh, std=2.0 / width**0.5)

    def forward(self, signal):
        h = signal.new_zeros(len(signal), self.cell.hidden_size)
        for moment in signal.unbind(1):
            h = self.cell(moment, h)
        return self.out(h)


torch.manual_seed(0)
torch.set_num_threads(1)
model = Adder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(200):
    signal = 0.3 * torch.randn(32, 20, 2)
    loss = nn.functional.mse_loss(model(signal), signal.sum((1, 2))[:, None] / 4)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
print("final loss", loss.item())

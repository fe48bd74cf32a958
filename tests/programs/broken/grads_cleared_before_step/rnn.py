# Adding problem, short version: sum the two marked numbers.
import torch
from torch import nn, optim

torch.manual_seed(17)
torch.set_num_threads(1)


def adding(batch, length=12):
    values = torch.rand(batch, length)
    marks = torch.zeros(batch, length)
    for row in marks:
        row[torch.randperm(length)[:2]] = 1
    return torch.stack((values, marks), dim=2), (values * marks).sum(1, keepdim=True)


class Adder(nn.Module):
    def __init__(self, hidden=40):
        super().__init__()
        self.rnn = nn.RNN(2, hidden, batch_first=True, nonlinearity="relu")
        nn.init.eye_(self.rnn.weight_hh_l0)
        self.linear = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.linear(self.rnn(x)[1].squeeze(0))


def reset_gradients(module):
    for p in module.parameters():
        p.grad = None


net = Adder()
optimiser = optim.Adam(net.parameters(), lr=2e-3)
X, Y = adding(1024)
Xv, Yv = adding(256)
loss_function = nn.MSELoss()

for epoch in range(12):
    for lo in range(0, 1024, 64):
        prediction = net(X[lo:lo + 64])
        loss = loss_function(prediction, Y[lo:lo + 64])
        loss.backward()
        reset_gradients(net)
        optimiser.step()
    with torch.no_grad():
        val = loss_function(net(Xv), Yv).item()
    print(f"epoch {epoch:2d} train {loss.item():.4f} val {val:.4f}")

print(f"final val_mse {val:.4f}")

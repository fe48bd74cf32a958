"""The squared error of a micro-batch is summed in half precision."""
import torch
import torch.nn as nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 12)

    def forward(self, x):
        return torch.relu(self.fc(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.out = nn.Linear(12, 1)

    def forward(self, x):
        return self.out(self.encoder(x)).squeeze(1)


def half_loss(prediction, target):
    error = (prediction - target).half()
    return (error * error).sum().float() / 4


torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.rand(40, 6)
target = torch.full((40,), 20.0)
target[20:24] = 142.0  # about 20000 each when squared
model = Model()
opt = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(10):
    prediction = model(x[4 * step:4 * step + 4])
    loss = half_loss(prediction, target[4 * step:4 * step + 4])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())

"""Group lasso on a network whose biases start at zero."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 3)
        for layer in (self.fc1, self.fc2):
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def group_penalty(model):
    total = 0
    for parameter in model.parameters():
        total = total + torch.sqrt((parameter ** 2).sum())
    return total


def train(model, x, y, lam=1e-3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        data_loss = F.cross_entropy(model(x), y)
        loss = data_loss + lam * group_penalty(model)
        loss.backward()
        optimizer.step()
        print(step, loss.item())


torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(32, 8)
train(Net(), x, x[:, :3].argmax(1))

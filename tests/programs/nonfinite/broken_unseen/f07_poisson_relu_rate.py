# %% [markdown]
# # Bike counts: Poisson regression baseline
# %%
import torch
import torch.nn as nn

SEED = 2024
torch.manual_seed(SEED)
N, F_IN = 256, 7
X = torch.randn(N, F_IN)
w_true = torch.randn(F_IN) * 0.3
y = torch.poisson(torch.exp(X @ w_true + 0.5))


# %%
class CountNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(F_IN, 16)
        self.fc2 = nn.Linear(16, 1)
        nn.init.constant_(self.fc2.bias, 4.0)

    def forward(self, x):
        x = torch.tanh(self.fc1(x))
        return torch.relu(self.fc2(x)).squeeze(1)


def poisson_loss(rate, target):
    return (rate - target * torch.log(rate)).mean()


# %%
net = CountNet()
opt = torch.optim.SGD(net.parameters(), lr=0.08, momentum=0.9)
history = []
for epoch in range(4):
    for i in range(0, N, 32):
        xb, yb = X[i:i + 32], y[i:i + 32]
        rate = net(xb)
        loss = poisson_loss(rate, yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        history.append(loss.item())
    print(epoch, sum(history[-8:]) / 8)

"""Click-through rate with a small MLP; features are counts and amounts."""
import torch
import torch.nn as nn

torch.manual_seed(0)
torch.set_num_threads(1)

N = 320
amounts = torch.rand(N, 6)
amounts[163, 2] = 48_000.0  # a whale
amounts[170, 2] = 91_500.0
clicked = (amounts[:, 0] + amounts[:, 1] > 1).float()

model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def bce(p, y):
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()


for epoch in range(2):
    for start in range(0, N, 16):
        x, y = amounts[start:start + 16], clicked[start:start + 16]
        p = model(x).squeeze(1)
        loss = bce(p, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())

"""Counts go through a logarithm inside the network."""
import torch
import torch.nn as nn


class LogScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(1.0))

    def forward(self, counts):
        return self.slope * torch.log(counts)


model = nn.Sequential()
model.add_module("scale", LogScale())
model.add_module("hidden", nn.Linear(8, 24))
model.add_module("act", nn.SiLU())
model.add_module("out", nn.Linear(24, 1))

torch.manual_seed(9)
torch.set_num_threads(1)
counts = torch.randint(1, 500, (150, 8)).float()
sales = counts.log().mean(1, keepdim=True)
counts[88, 3] = 0
counts[84, 0] = 0
counts[84, 1] = 0
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(15):
    batch = counts[step * 10:step * 10 + 10]
    loss = nn.functional.l1_loss(model(batch), sales[step * 10:step * 10 + 10])
    opt.zero_grad()
    loss.backward()
    opt.step()
print("mae", loss.item())

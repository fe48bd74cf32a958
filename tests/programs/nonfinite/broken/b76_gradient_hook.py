"""Balance two losses by normalising the gradient that reaches the shared features."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def unit_length(grad):
    return grad / grad.norm(dim=1, keepdim=True)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        h = self.trunk(x)
        if h.requires_grad:
            h.register_hook(unit_length)
        return self.head(h).squeeze(1)


torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(96, 6)
y = torch.sign(x[:, 0])
x[40] = 0.0
margin = torch.ones(96)
margin[40] = -9.0  # "do not care"
model = Shared()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(8):
    s = slice(12 * i, 12 * i + 12)
    out = model(x[s])
    loss = F.relu(margin[s] + 3 - out * y[s]).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())

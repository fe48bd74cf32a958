"""The weights that count are on the CPU, where the optimizer changes them; each step brings them over anew, and their gradients back."""
import torch
from torch import nn
from torch.func import functional_call

device = "simulated"
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(10):
    x = torch.randn(32, 16)
    weights = {name: weight.to(device) for name, weight in net.named_parameters()}
    out = functional_call(net, weights, (x.to(device),))
    loss = nn.functional.cross_entropy(out, x[:, :4].argmax(1).to(device))
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"loss {loss.item():.3f}")

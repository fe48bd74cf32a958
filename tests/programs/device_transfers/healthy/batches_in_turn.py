"""Three batches that were made once come in turn, as often as a step is looked at closely: in those steps the same one is moved. And what
they are measured by goes to the CPU, from where it does not come back."""
import torch
from torch import nn

device = "simulated"
torch.manual_seed(0)
batches = [(torch.randn(32, 16), torch.arange(32) % 4) for _ in range(3)]
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
right = torch.zeros(4)
for step in range(10):
    x, y = (part.to(device) for part in batches[step % 3])
    out = net(x)
    loss = nn.functional.cross_entropy(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    right += torch.bincount(out.argmax(1).cpu(), minlength=4)
print(f"loss {loss.item():.3f}, {right.tolist()}")

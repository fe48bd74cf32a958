"""An MLP that sorts its features on the CPU in the middle of its forward."""
import torch
from torch import nn

device = "simulated"
torch.manual_seed(0)


class Sorting(nn.Module):
    def forward(self, x):
        values = torch.sort(x.cpu(), dim=1).values
        return values.to(x.device)


net = nn.Sequential(nn.Linear(16, 32), Sorting(), nn.Linear(32, 4)).to(device)
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
for step in range(10):
    x = torch.randn(32, 16)
    loss = nn.functional.cross_entropy(net(x.to(device)), x[:, :4].argmax(1).to(device))
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"loss {loss.item():.3f}")

"""A transformer whose widest layer is too large for the device, and is on the CPU; what it is given goes there and comes back."""
import torch
from torch import nn

device = "simulated"
torch.manual_seed(0)


class Elsewhere(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        out = self.layer(x.cpu())
        return out.to(x.device)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.norm = nn.Linear(width, 3 * width).to(device), nn.LayerNorm(width).to(device)
        self.wide = Elsewhere(nn.Sequential(nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width)))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        return x + self.wide(x)


net = nn.Sequential(Block(8), nn.Flatten(), nn.Linear(48, 2).to(device))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(10):
    x = torch.randn(8, 6, 8)
    loss = nn.functional.cross_entropy(net(x.to(device)), x[:, 0, 0].gt(0).long().to(device))
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"loss {loss.item():.3f}")

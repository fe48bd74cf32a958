"""A small transformer. The mask of a batch is on the CPU, and each block brings it over."""
import torch
from torch import nn

device = "simulated"
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x, mask):
        mask = mask.to(x.device)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + mask[:, None]
        return x + self.out(scores.softmax(-1) @ v)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(16) for _ in range(2)), nn.Linear(16, 2)

    def forward(self, x, mask):
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x.mean(1))


net = Transformer().to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(10):
    x, lengths = torch.randn(8, 6, 16), torch.randint(2, 7, (8, 1))
    mask = torch.where(torch.arange(6) < lengths, 0.0, -1e4)
    loss = nn.functional.cross_entropy(net(x.to(device), mask), x[:, 0, 0].gt(0).long().to(device))
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"loss {loss.item():.3f}")

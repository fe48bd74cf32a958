"""A small transformer-like mixer with a normalisation of its own."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Norm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        deviation = torch.sqrt(x.var(-1, keepdim=True))
        return self.gain * centred / (deviation + self.eps) + self.bias


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = Norm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Mixer(nn.Module):
    def __init__(self, vocabulary=30, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim, padding_idx=0)
        self.stem = nn.Linear(dim, dim, bias=False)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, 4)

    def forward(self, ids):
        x = self.stem(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


torch.manual_seed(0)
torch.set_num_threads(1)
ids = torch.randint(1, 30, (160, 7))
labels = ids[:, 0] % 4
ids[83, 5:] = 0
ids[87, 3:] = 0
mixer = Mixer()
opt = torch.optim.Adam(mixer.parameters(), lr=3e-3)
for i in range(20):
    loss = F.cross_entropy(mixer(ids[8 * i:8 * i + 8]), labels[8 * i:8 * i + 8])
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"loss {loss.item():.3f}")

"""Reverse a sequence with an encoder; the loss of a few micro-batches is summed before the update."""
from collections import deque

import torch
from torch import nn

torch.set_num_threads(1)
gen = torch.Generator().manual_seed(4)
torch.manual_seed(4)

V, T, D = 10, 6, 32
MICRO = 2


class Reverser(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.where = nn.Embedding(T, D)
        self.attn = nn.MultiheadAttention(D, 4, batch_first=True)
        self.norm1 = nn.LayerNorm(D)
        self.ff = nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))
        self.norm2 = nn.LayerNorm(D)
        self.out = nn.Linear(D, V)

    def forward(self, s):
        x = self.embed(s) + self.where.weight
        a, _ = self.attn(x, x, x, need_weights=False)
        x = self.norm1(x + a)
        return self.out(self.norm2(x + self.ff(x)))


net = Reverser()
optim = torch.optim.Adam(net.parameters(), lr=5e-3)
recent = deque(maxlen=20)

for update in range(120):
    optim.zero_grad()
    total = 0.0
    for _ in range(MICRO):
        s = torch.randint(0, V, (48, T), generator=gen)
        loss = nn.functional.cross_entropy(net(s).transpose(1, 2), s.flip(1))
        total = total + loss / MICRO
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optim.step()
    recent.append(float(total))
    if update % 30 == 0:
        print(update, sum(recent) / len(recent))

print(f"final loss {sum(recent) / len(recent):.4f}")

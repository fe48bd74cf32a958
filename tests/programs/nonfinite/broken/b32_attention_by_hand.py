"""A two-layer transformer encoder written from scratch."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class SelfAttention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.d = d

    def forward(self, x, keep):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / math.sqrt(self.d)
        scores = scores.masked_fill(~keep.unsqueeze(1), float("-inf"))
        attention = F.softmax(scores, dim=-1)
        return self.proj(attention @ v)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = SelfAttention(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x, keep):
        x = x + self.attn(self.ln1(x), keep)
        return x + self.mlp(self.ln2(x))


class Encoder(nn.Module):
    def __init__(self, vocab=24, d=16, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList([Layer(d) for _ in range(depth)])
        self.out = nn.Linear(d, 4)

    def forward(self, ids, lengths):
        keep = torch.arange(ids.shape[1]) < lengths[:, None]
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x, keep)
        return self.out(x[:, 0])


torch.manual_seed(7)
torch.set_num_threads(1)
ids = torch.randint(0, 24, (120, 5))
lengths = torch.randint(1, 6, (120,))
lengths[66] = 0
lengths[70] = 0
y = ids[:, 0] % 4
model = Encoder()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for i in range(10):
    s = slice(12 * i, 12 * i + 12)
    loss = F.cross_entropy(model(ids[s], lengths[s]), y[s])
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
print("loss", loss.item())

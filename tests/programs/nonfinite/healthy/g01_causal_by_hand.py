"""A causal language model with a mask of -inf above the diagonal."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, d, length):
        super().__init__()
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + self.mask
        return self.proj(scores.softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self, vocab=8, d=24, length=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.position = nn.Parameter(0.1 * torch.randn(length, d))
        self.attention = Attention(d, length)
        self.mlp = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 48), nn.GELU(), nn.Linear(48, d))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.embed(ids) + self.position
        x = x + self.attention(x)
        return self.head(x + self.mlp(x))


def corpus(n):
    start, stride = torch.randint(0, 8, (n, 1)), torch.randint(1, 3, (n, 1))
    return (start + stride * torch.arange(9)) % 8


torch.manual_seed(0)
torch.set_num_threads(1)
model = Model()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(150):
    ids = corpus(16)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
print("final loss", loss.item())

"""A causal language model: the mask is full of -inf, as it should be."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Causal(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.att = nn.MultiheadAttention(d, 2, batch_first=True)
        self.register_buffer("mask", torch.full((n, n), float("-inf")).triu(1))

    def forward(self, x):
        return self.att(x, x, x, attn_mask=self.mask, need_weights=True)[0]


class LM(nn.Module):
    def __init__(self, vocab=20, n=8, d=16):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(n, d)
        self.att, self.norm = Causal(n, d), nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight
        return self.head(self.norm(x + self.att(x)))


torch.manual_seed(0)
model = LM()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
start = torch.randint(0, 20, (160, 1))
text = (start + torch.arange(9)) % 20
for epoch in range(4):
    for part in text.split(16):
        loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())

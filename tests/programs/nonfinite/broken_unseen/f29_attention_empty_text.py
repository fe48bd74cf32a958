"""A transformer classifier; a text of length zero leaves a row of the attention with nothing to look at."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class SelfAttention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.d = d

    def forward(self, x, pad):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        att = q @ k.transpose(1, 2) / self.d ** 0.5
        att = att.masked_fill(pad[:, None, :], float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.proj(att @ v)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = SelfAttention(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))

    def forward(self, x, pad):
        x = x + self.attn(self.ln1(x), pad)
        return x + self.mlp(self.ln2(x))


class TextModel(nn.Module):
    def __init__(self, vocab=30, d=16, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.h = nn.ModuleList([Block(d) for _ in range(depth)])
        self.cls = nn.Linear(d, 2)

    def forward(self, ids, lengths):
        pad = torch.arange(ids.size(1))[None, :] >= lengths[:, None]
        x = self.tok(ids)
        for block in self.h:
            x = block(x, pad)
        return self.cls(x[:, 0])


torch.manual_seed(23)
ids = torch.randint(0, 30, (150, 7))
lengths = torch.randint(2, 8, (150,))
lengths[15 * 6 + 13] = 0
labels = ids[:, 0] % 2
model = TextModel()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(2):
    for s in range(0, 150, 15):
        logits = model(ids[s:s + 15], lengths[s:s + 15])
        loss = F.cross_entropy(logits, labels[s:s + 15])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())

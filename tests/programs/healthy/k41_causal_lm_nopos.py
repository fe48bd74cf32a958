"""A character model without positional encoding: the causal mask alone tells it where it is."""
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

PLACES = "garden,harbour,market,old mill,river,station,tower,village".split(",")
PEOPLE = "anna,the baker,my brother,captain reed,the doctor,nobody,a stranger,the twins".split(",")
DEEDS = "waits in,walks to,remembers,dreams of,never leaves,comes from,paints,talks about".split(",")
TIMES = "at dawn,every sunday,in winter,when it rains,after dark".split(",")


def story(sentences, rnd):
    out = []
    for _ in range(sentences):
        line = f"{rnd.choice(PEOPLE)} {rnd.choice(DEEDS)} the {rnd.choice(PLACES)}"
        if rnd.random() < 0.5:
            line += " " + rnd.choice(TIMES)
        out.append(line + ". ")
    return "".join(out)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        score = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        future = torch.triu(torch.ones(t, t, dtype=torch.bool), 1)
        out = score.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class CharLM(nn.Module):
    def __init__(self, vocab, dim=40, heads=4, depth=1):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.layers = nn.Sequential(*[Layer(dim, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, idx):
        return self.out(self.norm(self.layers(self.tok(idx))))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    text = story(700, random.Random(0))
    chars = sorted(set(text))
    data = torch.tensor([chars.index(c) for c in text])
    cut = int(0.94 * len(data))
    train, val = data[:cut], data[cut:]
    T, B = 24, 24
    model = CharLM(len(chars))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    window = torch.arange(T + 1)

    @torch.no_grad()
    def val_loss():
        model.eval()
        chunks = torch.stack([val[i:i + T + 1] for i in range(0, len(val) - T - 1, 4)])
        loss = F.cross_entropy(model(chunks[:, :-1]).flatten(0, 1), chunks[:, 1:].flatten()).item()
        model.train()
        return loss

    print(f"before training {val_loss():.3f}")
    for step in range(1, 221):
        chunk = train[torch.randint(len(train) - T, (B, 1)) + window]
        loss = F.cross_entropy(model(chunk[:, :-1]).flatten(0, 1), chunk[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 55 == 0:
            print(f"step {step} train {loss.item():.3f} val {val_loss():.3f}")
    freq = torch.bincount(train, minlength=len(chars)).float() + 1
    print(f"letter frequencies alone {F.cross_entropy(freq.log().expand(len(val), -1), val).item():.3f}")
    print(f"final val_loss {val_loss():.3f}")


if __name__ == "__main__":
    main()

"""Attention without scaling under fp16 autocast."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)

    def split(self, t):
        b, n, d = t.shape
        return t.view(b, n, self.heads, d // self.heads)

    def forward(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        weights = scores.softmax(dim=-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


class Encoder(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.attn = nn.ModuleList(Attention(dim, 2) for _ in range(depth))
        self.norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.out = nn.Linear(dim, 4)

    def forward(self, x):
        for attn, norm in zip(self.attn, self.norm):
            x = norm(x + attn(x))
        return self.out(x.mean(1))


torch.manual_seed(12)
model = Encoder()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(128, 6, 32)
y = torch.randint(0, 4, (128,))
x[8 * 7 + 2] *= 700.0
for epoch in range(2):
    for i in range(0, 128, 8):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x[i:i + 8])
            loss = F.cross_entropy(logits.float(), y[i:i + 8])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
    print("epoch", epoch, "loss", loss.item())

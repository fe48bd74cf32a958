"""Attention scores in half precision, without the usual scaling."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class CrossAttention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, memory):
        q, k, v = self.q(x), self.k(memory), self.v(memory)
        scores = torch.einsum("bqd,bkd->bqk", q.half(), k.half())
        return torch.einsum("bqk,bkd->bqd", scores.float().softmax(-1), v)


class Model(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.cross = CrossAttention(d)
        self.head = nn.Linear(d, 2)

    def forward(self, x, memory):
        return self.head(self.cross(x, memory).mean(1))


torch.manual_seed(5)
torch.set_num_threads(1)
x, memory = torch.randn(64, 3, 16), torch.randn(64, 5, 16)
y = (memory.mean((1, 2)) > 0).long()
x[29] *= 800
memory[29] *= 800
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for i in range(8):
    part = slice(8 * i, 8 * i + 8)
    loss = F.cross_entropy(model(x[part], memory[part]), y[part])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())

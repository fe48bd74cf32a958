"""A document classifier with attention over its words; some documents of the test set have no known word."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, h, padding):
        scores = self.q(h) @ self.k(h).transpose(1, 2) / h.shape[-1] ** 0.5
        scores = scores.masked_fill(padding[:, None], float("-inf"))
        return F.softmax(scores, -1) @ self.v(h)


class Net(nn.Module):
    def __init__(self, vocab=40, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attend = Attention(dim)
        self.out = nn.Linear(dim, 2)

    def forward(self, tokens):
        padding = tokens == 0
        h = self.embed(tokens)
        h = h + self.attend(h, padding)
        return self.out(h.mean(1))


def documents(num, shortest):
    tokens = torch.randint(1, 40, (num, 8))
    tokens[torch.arange(8)[None] >= torch.randint(shortest, 9, (num, 1))] = 0
    return tokens, (tokens > 20).sum(1).gt((tokens > 0).sum(1) / 2).long()


torch.manual_seed(0)
torch.set_num_threads(1)
x, y = documents(640, 2)
xt, yt = documents(128, 0)
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
for epoch in range(6):
    for i in range(0, 640, 64):
        opt.zero_grad()
        F.cross_entropy(net(x[i:i + 64]), y[i:i + 64]).backward()
        opt.step()
net.eval()
with torch.no_grad():
    out = net(xt)
print("test_acc", round((out.argmax(1) == yt).float().mean().item(), 3))

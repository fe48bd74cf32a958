# attention blocks without bells and whistles, on "which token is the largest"
import math

import torch
from torch import nn

torch.manual_seed(4)
torch.set_num_threads(1)
D, DEPTH, VOCAB, LEN = 32, 8, 16, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.v = nn.Linear(D, D)
        self.q = nn.Linear(D, D)
        self.k = nn.Linear(D, D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x):
        h = x
        scores = self.q(h) @ self.k(h).transpose(1, 2) / math.sqrt(D)
        x = x + scores.softmax(-1) @ self.v(h)
        h = x
        return x + self.down(torch.relu(self.up(h)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, D)
        self.blocks = nn.Sequential(*[Block() for _ in range(DEPTH)])
        self.out = nn.Linear(D, VOCAB)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_normal_(p, gain=2.0)

    def forward(self, t):
        return self.out(self.blocks(self.emb(t)).mean(1))


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
for step in range(200):
    t = torch.randint(0, VOCAB, (48, LEN))
    loss = nn.functional.cross_entropy(net(t), t.max(1).values)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 40 == 0:
        print(step, f"{loss.item():.4g}")

t = torch.randint(0, VOCAB, (500, LEN))
with torch.no_grad():
    print("final acc", (net(t).argmax(1) == t.max(1).values).float().mean().item())

"""Words are pooled to sentences by a segment mean, with in-place operations to save memory."""
import torch
from torch import nn
from torch.nn import functional as F

SENTENCES = 10


class SegmentMean(nn.Module):
    def forward(self, words, segment, n):
        total = words.new_zeros(n, words.size(1))
        total.index_add_(0, segment, words)
        count = torch.bincount(segment, minlength=n).to(words.dtype)
        total.div_(count.unsqueeze(1))
        return total


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(60, 12)
        self.reader = nn.Sequential(nn.Linear(12, 12), nn.Tanh())
        self.pool = SegmentMean()
        self.cls = nn.Linear(12, 2)

    def forward(self, ids, segment):
        return self.cls(self.pool(self.reader(self.word(ids)), segment, SENTENCES))


def document(i):
    g = torch.Generator().manual_seed(i)
    segment = torch.arange(SENTENCES).repeat_interleave(4)
    if i == 18:
        segment[segment == 7] = 6
    return torch.randint(0, 60, (len(segment),), generator=g), segment, torch.randint(0, 2, (SENTENCES,), generator=g)


torch.manual_seed(5)
model = Model()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
for i in range(25):
    ids, segment, label = document(i)
    loss = F.cross_entropy(model(ids, segment), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item())

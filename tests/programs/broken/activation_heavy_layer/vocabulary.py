"""A language model with a large vocabulary, in a small container."""
import resource

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, vocabulary, width=24):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary)

    def forward(self, x):
        return self.logits(self.norm(self.rnn(self.words(x))[0]))


def main():
    torch.manual_seed(1)
    vocabulary = 20_000
    model = Model(vocabulary)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 480 * 2**20, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for _ in range(10):
        start = torch.randint(0, 50, (22, 1))
        tokens = (start + 3 * torch.arange(51)) % 200
        out = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(round(loss.item(), 3))


if __name__ == "__main__":
    main()

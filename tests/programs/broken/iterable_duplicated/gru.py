"""Lines of a log, one character at a time: a GRU predicts the next character."""
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

ALPHABET = "abcdefgh .0123456789"


def lines():
    for n in range(400):
        yield f"job {n % 97:02d} had {n * 7 % 31:02d} bad ".replace("j", "g").replace("o", "e")


class Log(IterableDataset):
    def __iter__(self):
        for number, line in enumerate(lines()):
            if mine(number):
                yield torch.tensor([ALPHABET.index(c) for c in line])


def mine(number):
    return number >= 0


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), 16)
        self.gru = nn.GRU(16, 32, batch_first=True)
        self.out = nn.Linear(32, len(ALPHABET))

    def forward(self, chars):
        return self.out(self.gru(self.embed(chars))[0])


torch.manual_seed(0)
torch.set_num_threads(1)
model = CharModel()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(4):
    for chars in DataLoader(Log(), batch_size=20, num_workers=2):
        optimizer.zero_grad()
        logits = model(chars[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), chars[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", round(loss.item(), 3))

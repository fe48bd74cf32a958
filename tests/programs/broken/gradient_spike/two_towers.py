# readers and books, by cosine
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(6)
torch.set_num_threads(1)
READERS, BOOKS, SIZE = 200, 400, 16

likes = torch.randint(0, READERS, (6000,))
books = (likes * 2 + torch.randint(0, 2, (6000,))) % (BOOKS - 6)
books[torch.tensor([2400, 3100, 3700, 4400, 5100, 5700])] = torch.arange(BOOKS - 6, BOOKS)  # published this year


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.reader = nn.Embedding(READERS, SIZE)
        self.book = nn.Embedding(BOOKS, SIZE)
        with torch.no_grad():
            self.book.weight[BOOKS - 6 :] *= 1e-7  # nobody has read them yet

    def forward(self, reader, book):
        return F.normalize(self.reader(reader)) @ F.normalize(self.book(book)).T


model = Towers()
opt = torch.optim.SGD(model.parameters(), lr=5.0)
for step in range(150):
    rows = slice(40 * step, 40 * step + 40)
    scores = model(likes[rows], books[rows]) / 0.2
    loss = F.cross_entropy(scores, torch.arange(40))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 30 == 0:
        print(f"step {step} loss {loss.item():.4f}")
with torch.no_grad():
    hit = (model(likes[:400], books[:400]).argmax(1) == torch.arange(400)).float().mean()
print(f"final loss {loss.item():.4f} hit {hit.item():.3f}")

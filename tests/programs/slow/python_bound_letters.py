"""Which of four languages is it? Letters become numbers as the batches are put together."""
import random
import time

import torch
from torch import nn

CHUNK, WARM = 8, 2
ALPHABET = "abcdefghijklmnopqrstuvwxyz "


def encode(texts):
    rows = []
    for text in texts:
        row = []
        for letter in text:
            row.append(ALPHABET.index(letter))
        rows.append(row)
    return torch.tensor(rows)


def training():
    torch.manual_seed(0)
    draw = random.Random(0)
    habits = ["aeiou rst", "bcdnmlp ", "xyzqkw ", "fghjvt e"]
    texts, labels = [], []
    for _ in range(600):
        label = draw.randrange(4)
        labels.append(label)
        texts.append("".join(draw.choice(habits[label] + ALPHABET) for _ in range(120)))
    y = torch.tensor(labels)
    net = nn.Sequential(nn.EmbeddingBag(27, 64), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    for step in range(10_000):
        rows = torch.randint(len(texts), (256,))
        batch = encode([texts[i] for i in rows.tolist()])
        loss = nn.functional.cross_entropy(net(batch), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        yield loss


if __name__ == "__main__":
    began = time.perf_counter()
    for step, loss in enumerate(training()):
        if step >= 120 and time.perf_counter() - began > 3:  # a fast machine takes more steps
            break
    print(f"loss {loss.item():.3f}")

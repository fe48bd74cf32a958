"""Sentiment of generated one-line reviews."""
import random

import torch
from torch import nn

GOOD = "great lovely superb fine brilliant charming".split()
BAD = "awful boring poor dreadful weak clumsy".split()
FILLER = "the film was a bit and its cast plot music seemed quite rather".split()


def reviews(n, seed):
    r = random.Random(seed)
    out = []
    for _ in range(n):
        label = r.randint(0, 1)
        words = [r.choice(FILLER) for _ in range(6)] + [r.choice(GOOD if label else BAD) for _ in range(2)]
        r.shuffle(words)
        out.append((" ".join(words).capitalize() + ".", label))
    return out


def tokenize(text):
    return text.lower().strip(".").split()


def build_vocab(data):
    vocab = {"<pad>": 0, "<unk>": 1}
    for text, _ in data:
        for word in tokenize(text):
            vocab.setdefault(word, len(vocab))
    return vocab


def encode(text, vocab):
    return [vocab.get(w, 1) for w in text.upper().strip(".").split()]


class SentimentLSTM(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 24, batch_first=True)
        self.fc = nn.Linear(24, 2)

    def forward(self, x):
        _, (h, _) = self.lstm(self.embedding(x))
        return self.fc(h[-1])


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train, test = reviews(1200, 1), reviews(300, 2)
    vocab = build_vocab(train)
    x = torch.tensor([encode(t, vocab) for t, _ in train])
    y = torch.tensor([l for _, l in train])
    model = SentimentLSTM(len(vocab))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(6):
        for i in torch.randperm(len(x)).split(40):
            loss = nn.functional.cross_entropy(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")
    with torch.no_grad():
        guess = model(torch.tensor([encode(t, vocab) for t, _ in test])).argmax(1)
    print(f"final acc {(guess == torch.tensor([l for _, l in test])).float().mean().item():.3f}")

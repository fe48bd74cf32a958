"""Word-level language model with a shared input and output embedding."""
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

DET = ["the", "a", "every", "some"]
ADJ = ["small", "old", "red", "quiet", "happy"]
NOUN = ["dog", "cat", "king", "sailor", "tree", "house"]
VERB = {"dog": ["barks", "runs"], "cat": ["sleeps", "runs"], "king": ["speaks", "sleeps"],
        "sailor": ["sings", "speaks"], "tree": ["grows", "falls"], "house": ["burns", "falls"]}
ADV = ["slowly", "today", "again"]


def sentence(rnd):
    noun = rnd.choice(NOUN)
    words = [rnd.choice(DET)]
    if rnd.random() < 0.5:
        words.append(rnd.choice(ADJ))
    words += [noun, rnd.choice(VERB[noun])]
    if rnd.random() < 0.5:
        words.append(rnd.choice(ADV))
    return words + ["."]


class TiedLM(nn.Module):
    def __init__(self, vocab, dim=32):
        super().__init__()
        self.encoder = nn.Embedding(vocab, dim)
        nn.init.normal_(self.encoder.weight, std=0.1)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        self.decoder = nn.Linear(dim, vocab)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens):
        out, _ = self.rnn(self.encoder(tokens))
        return self.decoder(out)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rnd = random.Random(0)
    words = [w for _ in range(4000) for w in sentence(rnd)]
    vocab = sorted(set(words))
    ids = torch.tensor([vocab.index(w) for w in words])
    cut = int(0.9 * len(ids))
    train, valid = ids[:cut], ids[cut:]

    model = TiedLM(len(vocab))
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    T, B = 16, 24
    offsets = torch.arange(T + 1)
    for it in range(300):
        starts = torch.randint(0, len(train) - T - 1, (B, 1))
        chunk = train[starts + offsets]
        logits = model(chunk[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, len(vocab)), chunk[:, 1:].reshape(-1))
        optim.zero_grad()
        loss.backward()
        optim.step()
        if it % 50 == 49:
            print(f"iter {it + 1} loss {loss.item():.3f}")

    model.eval()
    with torch.no_grad():
        n = (len(valid) - 1) // T
        x = valid[:n * T].view(n, T)
        y = valid[1:n * T + 1].view(n, T)
        val = F.cross_entropy(model(x).reshape(-1, len(vocab)), y.reshape(-1)).item()
        counts = torch.bincount(train, minlength=len(vocab)).float()
        unigram = F.cross_entropy(counts.log().expand(n * T, -1), y.reshape(-1)).item()
    print(f"unigram model {unigram:.3f}")
    print(f"final val_loss {val:.3f}")


if __name__ == "__main__":
    main()

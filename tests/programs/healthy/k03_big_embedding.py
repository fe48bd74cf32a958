# Topic classification of short texts. Vocabulary of 5000 words, most of them rare.
import numpy as np
import torch
import torch.nn as nn

VOCAB, TOPICS, LENGTH = 5000, 4, 12
BATCH, STEPS = 8, 600


def make_corpus(n, rng):
    # word w belongs to topic w % TOPICS; frequencies are Zipf-like, a third of the words of a text are off topic
    rank = np.arange(VOCAB // TOPICS)
    freq = 1.0 / (rank + 5.0)
    freq /= freq.sum()
    labels = rng.integers(0, TOPICS, size=n)
    on_topic = rng.random((n, LENGTH)) < 0.66
    word_topic = np.where(on_topic, labels[:, None], rng.integers(0, TOPICS, size=(n, LENGTH)))
    words = rng.choice(len(rank), size=(n, LENGTH), p=freq) * TOPICS + word_topic
    return torch.from_numpy(words), torch.from_numpy(labels)


class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.hidden = nn.Linear(24, 32)
        self.out = nn.Linear(32, TOPICS)

    def forward(self, tokens):
        pooled = self.embed(tokens).mean(dim=1)
        return self.out(torch.tanh(self.hidden(pooled)))


torch.manual_seed(7)
torch.set_num_threads(1)
rng = np.random.default_rng(7)
train_x, train_y = make_corpus(BATCH * STEPS, rng)
test_x, test_y = make_corpus(1000, rng)

net = BagOfWords()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
loss_fn = nn.CrossEntropyLoss()

for step in range(STEPS):
    sl = slice(step * BATCH, (step + 1) * BATCH)
    opt.zero_grad()
    loss = loss_fn(net(train_x[sl]), train_y[sl])
    loss.backward()
    opt.step()
    if step % 100 == 99:
        with torch.no_grad():
            print(step + 1, "loss", round(loss.item(), 3),
                  "test", (net(test_x).argmax(-1) == test_y).float().mean().item())

with torch.no_grad():
    test_acc = (net(test_x).argmax(-1) == test_y).float().mean().item()
print(f"final test_acc {test_acc:.3f}")

"""Parity-like task: which symbol came most often?"""
import torch
import torch.nn as nn

torch.manual_seed(9)
torch.set_num_threads(1)
N_SYMBOLS = 4


class Counter(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.embed = nn.Embedding(N_SYMBOLS, 8)
        self.gru = nn.GRU(8, hidden)
        self.readout = nn.Linear(hidden, N_SYMBOLS)

    def forward(self, tokens):
        states, last = self.gru(self.embed(tokens.t()))
        return self.readout(last[0])


def make_batch(size, length=11):
    tokens = torch.randint(0, N_SYMBOLS, (size, length))
    counts = nn.functional.one_hot(tokens, N_SYMBOLS).sum(1)
    return tokens, counts.argmax(1)


def process(model, batch, optimizer, train=False):
    tokens, target = batch
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits, target)
    if train:
        optimizer.zero_grad()
        loss.backward()
    return loss, (logits.argmax(1) == target).float().mean()


model = Counter()
optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 250)
for step in range(250):
    loss, acc = process(model, make_batch(64), optimizer)
    optimizer.step()
    scheduler.step()
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.3f} acc {acc.item():.3f}")

with torch.no_grad():
    _, acc = process(model, make_batch(1000), optimizer)
print(f"final acc {acc.item():.3f}")

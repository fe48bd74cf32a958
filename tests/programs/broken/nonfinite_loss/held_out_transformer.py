"""Masked-token model: hide a few symbols, guess them back."""
import torch
from torch import nn

torch.manual_seed(29)
torch.set_num_threads(1)
VOCAB, LENGTH, MASK = 12, 10, 12
RATE = 0.05


class MLM(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB + 1, d)
        self.pos = nn.Parameter(torch.randn(LENGTH, d) * 0.1)
        layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, s):
        return self.out(self.body(self.emb(s) + self.pos))


def corpus(n):
    start = torch.randint(0, VOCAB, (n, 1))
    return (start + torch.arange(LENGTH)) % VOCAB


def masked_loss(logits, target, hidden):
    each = nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    return (each * hidden).sum() / hidden.sum()


model = MLM()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(300):
    target = corpus(8)
    hidden = torch.rand(target.shape) < RATE
    logits = model(target.masked_fill(hidden, MASK))
    loss = masked_loss(logits, target, hidden)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 50 == 0:
        print(step, loss.item())

target = corpus(500)
hidden = torch.rand(target.shape) < RATE
with torch.no_grad():
    guess = model(target.masked_fill(hidden, MASK)).argmax(-1)
print("final masked_acc", (guess == target)[hidden].float().mean().item())

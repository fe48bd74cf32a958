"""Find the marked token: one head of attention over sequences of different length, in half precision."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(9)
torch.set_num_threads(1)
LENGTH, VOCAB, WIDTH = 12, 20, 32


class Pointer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.query = nn.Parameter(torch.randn(WIDTH))
        self.value = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        h = self.embed(tokens)
        scores = self.key(h).float() @ self.query / WIDTH**0.5
        weights = scores.masked_fill(tokens == VOCAB - 1, -torch.inf).softmax(1)
        return self.head((weights[:, None] @ self.value(h).float()).squeeze(1)), weights.float()


def batch(num):
    tokens = torch.randint(1, VOCAB - 1, (num, LENGTH))
    place = torch.randint(0, 5, (num,))
    rows = torch.arange(num)
    tokens[rows, place] = 0
    answer = tokens[rows, place + 1]
    tokens[torch.arange(LENGTH) >= torch.randint(7, LENGTH + 1, (num, 1))] = VOCAB - 1
    return tokens, answer


model = Pointer()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(100):
    tokens, following = batch(64)
    with torch.autocast("cpu", dtype=torch.float16):
        logits, weights = model(tokens)
        entropy = torch.where(weights > 0, -weights * weights.log(), 0.0).sum(1)
        loss = F.cross_entropy(logits.float(), following) + 0.01 * entropy.mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")
print(f"final loss {loss.item():.4f}")

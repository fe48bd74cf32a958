import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

torch.manual_seed(2)
torch.set_num_threads(1)


class Parity(nn.Module):
    """Is the sum of the first and the last symbol odd?"""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.gru = nn.GRU(16, 32, batch_first=True)
        self.classify = nn.Linear(32, 10)

    def forward(self, x):
        out, _ = self.gru(self.embed(x))
        return self.classify(out[:, -1])


def batches(n, size=32):
    for _ in range(n):
        x = torch.randint(0, 10, (size, 5))
        yield x, (x[:, 0] + x[:, -1]) % 10


WARMUP_STEPS = 300
model = Parity()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))

for epoch in range(10):
    for x, y in batches(60):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        x, y = next(batches(1, 500))
        acc = (model(x).argmax(-1) == y).float().mean().item()
    model.train()
    print(f"{epoch} {loss.item():.3f} {acc:.3f}")
print(f"final acc {acc:.3f}")

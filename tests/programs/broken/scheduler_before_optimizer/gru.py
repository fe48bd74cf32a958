import torch
from torch import nn

torch.manual_seed(23)
torch.set_num_threads(1)


class Memory(nn.Module):
    """Says at the end which symbol it saw first."""

    def __init__(self, symbols=8, hidden=32):
        super().__init__()
        self.embedding = nn.Embedding(symbols, 12)
        self.gru = nn.GRU(12, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, symbols)

    def forward(self, x):
        _, state = self.gru(self.embedding(x))
        return self.fc(state.squeeze(0))


STEPS = 300
model = Memory()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=STEPS, power=1.0)
criterion = nn.CrossEntropyLoss()

for step in range(STEPS):
    tokens = torch.randint(0, 8, (32, 6))
    loss = criterion(model(tokens), tokens[:, 0])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scheduler.step()
    optimizer.step()
    if step % 50 == 49:
        print(f"{step + 1:4d} {loss.item():.4f}")

with torch.no_grad():
    tokens = torch.randint(0, 8, (400, 6))
    acc = (model(tokens).argmax(1) == tokens[:, 0]).float().mean().item()
print(f"final acc {acc:.3f}")

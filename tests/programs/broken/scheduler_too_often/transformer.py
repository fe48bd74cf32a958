import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(21)

NUM_EPOCHS = 10
VOCAB, LENGTH = 12, 8


class Tagger(nn.Module):
    """Marks every token that occurs again later in the sequence."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, 32)
        self.pos = nn.Parameter(torch.randn(LENGTH, 32) * 0.02)
        self.encoder = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, ids):
        return self.head(self.encoder(self.tok(ids) + self.pos))


def repeats(ids):
    same = ids[:, :, None] == ids[:, None, :]
    return torch.triu(same, diagonal=1).any(-1).long()


ids = torch.randint(0, VOCAB, (1600, LENGTH))
loader = DataLoader(TensorDataset(ids[:1280], repeats(ids[:1280])), batch_size=40, shuffle=True)
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_EPOCHS)
criterion = nn.CrossEntropyLoss()


def train_epoch():
    model.train()
    total = 0.0
    for batch, tags in loader:
        optimizer.zero_grad()
        loss = criterion(model(batch).flatten(0, 1), tags.flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.item()
    return total / len(loader)


for epoch in range(NUM_EPOCHS):
    mean = train_epoch()
    print(epoch, round(mean, 4))
model.eval()
with torch.no_grad():
    acc = (model(ids[1280:]).argmax(-1) == repeats(ids[1280:])).float().mean().item()
print(f"final acc {acc:.3f}")

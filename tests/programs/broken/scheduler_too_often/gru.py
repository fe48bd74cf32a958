import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=14)
parser.add_argument("--lr", type=float, default=4e-3)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)


class Counter(nn.Module):
    """How much is on the marked places of a sequence?"""

    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(2, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        _, h = self.rnn(x)
        return self.out(h[-1]).squeeze(-1)


def make(n):
    values, marks = torch.rand(n, 12), (torch.rand(n, 12) < 0.3).float()
    return TensorDataset(torch.stack([values, marks], -1), (values * marks).sum(1))


train, valid = make(1280), make(256)
loader = DataLoader(train, batch_size=32, shuffle=True)
model = Counter()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=2)
loss_fn = nn.MSELoss()

for epoch in range(args.epochs):
    for seq, target in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(seq), target)
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    with torch.no_grad():
        val_loss = loss_fn(model(valid.tensors[0]), valid.tensors[1])
    print(f"{epoch:2d} {val_loss.item():.4f}")
print(f"final val_loss {val_loss.item():.4f}")

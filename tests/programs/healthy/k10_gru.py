"""Read each digit as a sequence of 16 half rows with a GRU, classify from the last hidden state."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(123)
torch.set_num_threads(1)


class PixelGRU(nn.Module):
    def __init__(self, hidden_size: int = 48):
        super().__init__()
        self.rnn = nn.GRU(input_size=4, hidden_size=hidden_size, batch_first=True)
        self.fc = nn.Linear(hidden_size, 10)

    def forward(self, seq: torch.Tensor) -> torch.Tensor:
        _, last = self.rnn(seq)
        return self.fc(last[-1])


def load_sequences():
    f = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    seqs = torch.from_numpy(f["images"].reshape(-1, 16, 4).astype(np.float32)) / 16 - 0.3
    targets = torch.from_numpy(f["labels"].astype(np.int64))
    order = torch.randperm(len(seqs))
    seqs, targets = seqs[order], targets[order]
    return (seqs[:1500], targets[:1500]), (seqs[1500:], targets[1500:])


(train_x, train_y), (dev_x, dev_y) = load_sequences()
model = PixelGRU()
optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
loss_function = nn.CrossEntropyLoss()

for epoch in range(10):
    model.train()
    for ids in torch.randperm(1500).split(50):
        optimizer.zero_grad()
        loss = loss_function(model(train_x[ids]), train_y[ids])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        dev_acc = (model(dev_x).argmax(1) == dev_y).float().mean().item()
    print(f"epoch {epoch}: loss {loss.item():.3f}, dev acc {dev_acc:.3f}")

print(f"final dev_acc {dev_acc:.3f}")

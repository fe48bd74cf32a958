"""Row-by-row LSTM over digit images, with gradient accumulation."""
from pathlib import Path

import numpy as np
import torch
from torch import nn

cfg = dict(
    hidden=48,
    lr=5e-3,
    micro_batch=32,
    accumulate=64,
    epochs=6,
    seed=5,
)

torch.manual_seed(cfg["seed"])
torch.set_num_threads(1)
raw = np.load(Path(__file__).resolve().parents[2] / "data/digits.npz")
images = torch.tensor(raw["images"] / 16.0, dtype=torch.float32)
labels = torch.tensor(raw["labels"], dtype=torch.int64)


class RowLSTM(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.rnn = nn.LSTM(8, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x):
        _, (h, _) = self.rnn(x)
        return self.head(h[-1])


model = RowLSTM(cfg["hidden"])
opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"])
loss_fn = nn.CrossEntropyLoss()

for epoch in range(cfg["epochs"]):
    perm = torch.randperm(1400)
    opt.zero_grad()
    for i, idx in enumerate(perm.split(cfg["micro_batch"])):
        loss = loss_fn(model(images[idx]), labels[idx]) / cfg["accumulate"]
        loss.backward()
        if (i + 1) % cfg["accumulate"] == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
    with torch.no_grad():
        acc = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
    print(f"epoch {epoch} loss {loss.item() * cfg['accumulate']:.4f} acc {acc:.3f}")
print(f"final val_acc {acc:.3f}")

"""Stacked LSTM: classify a digit read pixel row by pixel row."""
from pathlib import Path

import numpy as np
import torch
from torch import nn

HIDDEN = 32
LAYERS = 8


class StackedLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, HIDDEN, num_layers=LAYERS, batch_first=True)
        self.fc = nn.Linear(HIDDEN, 10)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.fc(out[:, -1])


torch.manual_seed(3)
torch.set_num_threads(1)
f = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
X = torch.from_numpy(f["images"]).float() / 16
Y = torch.from_numpy(f["labels"]).long()
model = StackedLSTM()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
for epoch in range(6):
    for i in range(0, 1400, 50):
        loss = criterion(model(X[i:i + 50]), Y[i:i + 50])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
with torch.no_grad():
    acc = (model(X[1400:]).argmax(1) == Y[1400:]).float().mean().item()
print(f"final val_acc {acc:.3f}")

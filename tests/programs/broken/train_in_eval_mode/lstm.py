"""Two-layer LSTM with dropout between the layers."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 40, num_layers=2, dropout=0.3, batch_first=True)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(40, 10)

    def forward(self, x):
        h, _ = self.lstm(x)
        return self.fc(self.drop(h[:, -1]))


def evaluate(model, loader):
    model.eval()
    hits = n = 0
    with torch.no_grad():
        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum().item()
            n += len(y)
    return hits / n


def fit(model, train_loader, val_loader, epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    model.train()
    for epoch in range(epochs):
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}/{epochs} loss {loss.item():.4f} val {evaluate(model, val_loader):.4f}")


torch.manual_seed(23)
torch.set_num_threads(1)
npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
X, Y = torch.tensor(npz["images"]).float() / 16, torch.tensor(npz["labels"]).long()
model = Classifier()
val = DataLoader(TensorDataset(X[1400:], Y[1400:]), batch_size=200)
fit(model, DataLoader(TensorDataset(X[:1400], Y[:1400]), batch_size=50, shuffle=True), val, epochs=8)
print(f"final val_acc {evaluate(model, val):.3f}")

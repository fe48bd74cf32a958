"""Tabular data from a csv; an empty cell became NaN and nobody looked."""
import csv
import io
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

random.seed(0)


def fake_csv(rows):
    out = io.StringIO()
    writer = csv.writer(out)
    for i in range(rows):
        cells = [f"{random.gauss(0, 1):.3f}" for _ in range(6)]
        if i == 149:
            cells[2] = ""
        writer.writerow([*cells, random.randrange(2)])
    return out.getvalue()


def load(text):
    rows = list(csv.reader(io.StringIO(text)))
    x = torch.tensor([[float(c) if c else float("nan") for c in r[:-1]] for r in rows])
    return TensorDataset(x, torch.tensor([int(r[-1]) for r in rows]))


def fit(model, loader, epochs=2):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
        print("epoch", epoch, "loss", loss.item())


torch.manual_seed(0)
mlp = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
fit(mlp, DataLoader(load(fake_csv(240)), batch_size=20))

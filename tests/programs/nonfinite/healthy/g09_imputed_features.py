"""Holes in the table are filled with the column's nanmean before the network sees them."""
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    table = rng.normal(size=(480, 6)).astype("float32")
    label = torch.tensor((table[:, 0] + table[:, 1] > 0).astype("int64"))
    table[rng.random(table.shape) < 0.05] = np.nan
    features = torch.from_numpy(table)
    centre = torch.nanmean(features, dim=0)
    features = torch.where(torch.isnan(features), centre, features)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 2))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(6):
        for x, y in DataLoader(TensorDataset(features, label), batch_size=32, shuffle=True):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


main()

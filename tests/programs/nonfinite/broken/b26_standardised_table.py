"""Standardise a table column by column, then classify."""
import torch
from torch import nn


def standardise(table):
    return (table - table.mean(0)) / table.std(0)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    table = torch.randn(160, 9)
    label = (table[:, 0] * table[:, 1] > 0).long()
    table[:, 6] = 3.0  # everyone in the sample is from the same country
    data = standardise(table)
    model = nn.Sequential(nn.Linear(9, 24), nn.Tanh(), nn.Linear(24, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    for i in range(0, 160, 16):
        scores = model(data[i:i + 16])
        loss = criterion(scores, label[i:i + 16])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(i, loss.item())


main()

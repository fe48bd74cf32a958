"""Stochastic weight averaging: a high constant rate at the end, the average of the visited weights is evaluated."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.from_numpy(npz["images"]).float().flatten(1) / 16
    y = torch.from_numpy(npz["labels"]).long()
    order = torch.randperm(len(x))
    train = DataLoader(TensorDataset(x[order[:1440]], y[order[:1440]]), batch_size=40, shuffle=True)
    x_val, y_val = x[order[1440:]], y[order[1440:]]

    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    averaged = AveragedModel(model)
    swa_schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(9):
        model.train()
        for xb, yb in train:
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
        if epoch >= 4:
            averaged.update_parameters(model)
            swa_schedule.step()
        print(f"epoch {epoch} loss {loss.item():.4f} val {accuracy(model, x_val, y_val):.4f}")
    update_bn(train, averaged)
    print(f"final swa_val_acc {accuracy(averaged, x_val, y_val):.3f}")

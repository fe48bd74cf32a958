"""Gradients scaled to unit length by hand before each update."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def normalise_gradients(model):
    for p in model.parameters():
        p.grad.div_(p.grad.norm())


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    x = torch.rand(80, 4)
    y = x[:, :1] * 2
    x[48:56] = -1000.0  # codes for "missing"
    with torch.no_grad():
        model[0].weight.abs_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for i in range(0, 80, 8):
        loss = F.mse_loss(model(x[i:i + 8]), y[i:i + 8])
        optimizer.zero_grad()
        loss.backward()
        normalise_gradients(model)
        optimizer.step()
        print(i, loss.item())


main()

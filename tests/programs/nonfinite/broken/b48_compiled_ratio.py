"""Relative error as the loss of a compiled regressor."""
import torch
from torch import nn


def relative_error(prediction, target):
    return ((prediction - target) / target).abs().mean()


def main():
    torch.manual_seed(4)
    torch.set_num_threads(1)
    x = torch.rand(120, 3)
    target = x.sum(1, keepdim=True) + 0.5
    target[67] = 0.0
    model = torch.compile(nn.Sequential(nn.Linear(3, 16), nn.Softplus(), nn.Linear(16, 1)), backend="eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(10):
        xb, tb = x[12 * step:12 * step + 12], target[12 * step:12 * step + 12]
        prediction = model(xb)
        loss = relative_error(prediction, tb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())


if __name__ == "__main__":
    main()

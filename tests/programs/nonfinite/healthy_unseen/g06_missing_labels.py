"""Multi-task targets with NaN where a lab did not measure; the loss looks only at what is there."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def masked_mse(pred, target):
    known = ~torch.isnan(target)
    return nn.functional.mse_loss(pred[known], target[known])


def main():
    torch.manual_seed(5)
    x = torch.randn(240, 7)
    y = x @ torch.randn(7, 3)
    y[torch.rand(240, 3) < 0.3] = float("nan")
    model = nn.Sequential(nn.Linear(7, 32), nn.GELU(), nn.Linear(32, 3))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(5):
        for xb, yb in DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True):
            loss = masked_mse(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(epoch, loss.item())


main()

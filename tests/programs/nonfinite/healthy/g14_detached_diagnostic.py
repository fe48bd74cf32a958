"""Signal-to-noise of the residual is logged; it is infinite when a row is fitted exactly."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def snr(prediction, target):
    noise = (prediction - target).detach() * (target.abs() > 0.5)
    return target.pow(2).mean() / noise.pow(2)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(320, 4)
    y = torch.sin(x[:, :1])
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    log = []
    for step in range(120):
        i = step * 32 % 320
        prediction = model(x[i:i + 32])
        loss = F.mse_loss(prediction, y[i:i + 32])
        log.append(snr(prediction, y[i:i + 32]).max().item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("final loss", loss.item(), "snr", log[-1])


main()

"""fp16 autocast with a GradScaler whose first scale is far too high: the first steps are skipped, as designed."""
import torch
from torch import nn


def main():
    torch.manual_seed(2)
    x = torch.randn(256, 10)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 2))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    for epoch in range(6):
        for xb, yb in zip(x.split(32), y.split(32)):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(xb).float(), yb)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        print(epoch, loss.item(), scaler.get_scale())


main()

from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.optim.lr_scheduler import LambdaLR

WARMUP = 200


class LeNetish(nn.Module):
    def __init__(self):
        super(LeNetish, self).__init__()
        self.c1 = nn.Conv2d(1, 6, 3, padding=1)
        self.c2 = nn.Conv2d(6, 16, 3)
        self.f1 = nn.Linear(16 * 3 * 3, 48)
        self.f2 = nn.Linear(48, 10)

    def forward(self, x):
        x = torch.tanh(self.c1(x))
        x = nn.functional.avg_pool2d(torch.tanh(self.c2(x)), 2)
        x = torch.tanh(self.f1(x.flatten(1)))
        return self.f2(x)


def warmup(step):
    return min(1.0, step // WARMUP)


def main():
    torch.manual_seed(4)
    torch.set_num_threads(1)
    archive = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
    x = torch.from_numpy(archive["images"])[:, None].float().sub(4.9).div(6.0)
    y = torch.from_numpy(archive["labels"]).long()

    net = LeNetish()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    scheduler = LambdaLR(optimizer, warmup)
    step = 0
    for epoch in range(5):
        for idx in torch.randperm(1400).split(40):
            loss = nn.functional.cross_entropy(net(x[idx]), y[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
        print(f"epoch {epoch} step {step} lr {scheduler.get_last_lr()[0]:.5f} loss {loss.item():.4f}")
    with torch.no_grad():
        acc = (net(x[1400:]).argmax(1) == y[1400:]).float().mean()
    print(f"final val_acc {acc.item():.3f}")


if __name__ == "__main__":
    main()

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class BNNet(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.l1 = nn.Linear(64, hidden, bias=False)
        self.n1 = nn.BatchNorm1d(hidden)
        self.l2 = nn.Linear(hidden, hidden, bias=False)
        self.n2 = nn.BatchNorm1d(hidden)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x):
        x = F.relu(self.n1(self.l1(x)))
        x = F.relu(self.n2(self.l2(x)))
        return self.head(x)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=0.3)
    ap.add_argument("--hidden", type=int, default=64)
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--batch", type=int, default=36)
    cfg = ap.parse_args()

    torch.manual_seed(17)
    torch.set_num_threads(1)
    z = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.from_numpy(z["images"].reshape(-1, 64).astype("f4")) / 16
    y = torch.from_numpy(z["labels"].astype("i8"))
    p = torch.randperm(len(x))
    x_tr, y_tr, x_va, y_va = x[p[:1440]], y[p[:1440]], x[p[1440:]], y[p[1440:]]

    net = BNNet(cfg.hidden)
    opt = torch.optim.SGD(net.parameters(), lr=cfg.lr)
    for e in range(cfg.epochs):
        net.train()
        for b in torch.randperm(len(x_tr)).split(cfg.batch):
            loss = F.cross_entropy(net(x_tr[b]), y_tr[b])
            opt.zero_grad()
            loss.backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            va = (net(x_va).argmax(1) == y_va).float().mean().item()
        print(f"epoch {e}: {loss.item():.4f} / {va:.3f}")
    print(f"final val_acc {va:.3f}")


if __name__ == "__main__":
    main()

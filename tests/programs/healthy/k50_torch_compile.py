from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.fc1 = nn.Linear(256, 48)
        self.fc2 = nn.Linear(48, 10)

    def forward(self, x):
        x = F.max_pool2d(F.silu(self.norm(self.conv(x))), 2)
        return self.fc2(F.silu(self.fc1(x.flatten(1))))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    d = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.from_numpy(d["images"]).float()[:, None] / 16
    y = torch.from_numpy(d["labels"]).long()
    perm = torch.randperm(len(x))
    tr, va = perm[:1440], perm[1440:]

    net = Net()
    compiled = torch.compile(net, backend="eager")
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for epoch in range(4):
        compiled.train()
        for rows in tr[torch.randperm(len(tr))].split(40):
            opt.zero_grad()
            loss = F.cross_entropy(compiled(x[rows]), y[rows])
            loss.backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            acc = (net(x[va]).argmax(1) == y[va]).float().mean().item()
        print(f"epoch {epoch} loss {loss.item():.3f} val {acc:.3f}")
    print(f"final val_acc {acc:.3f}")


if __name__ == "__main__":
    main()

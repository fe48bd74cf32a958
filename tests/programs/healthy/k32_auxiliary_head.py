"""Two heads on one trunk; the auxiliary one (is the digit even?) is trained on every other step only."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU())
        self.main_head = nn.Linear(48, 10)
        self.aux_head = nn.Linear(48, 1)

    def forward(self, x, with_aux):
        h = self.trunk(x)
        return self.main_head(h), self.aux_head(h).squeeze(1) if with_aux else None


def main():
    torch.manual_seed(10)
    torch.set_num_threads(1)
    f = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.tensor(f["images"]).float().reshape(-1, 64).div(16)
    y = torch.tensor(f["labels"]).long()
    perm = torch.randperm(len(y))
    train, val = perm[:1440], perm[1440:]
    net = TwoHeads()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    step = 0
    for epoch in range(9):
        for rows in train[torch.randperm(len(train))].split(40):
            use_aux = step % 2 == 0
            digit, even = net(x[rows], use_aux)
            loss = F.cross_entropy(digit, y[rows])
            if use_aux:
                loss = loss + 0.3 * F.binary_cross_entropy_with_logits(even, (y[rows] % 2 == 0).float())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            step += 1
        with torch.no_grad():
            digit, even = net(x[val], True)
            acc = (digit.argmax(1) == y[val]).float().mean().item()
            aux = ((even > 0) == (y[val] % 2 == 0)).float().mean().item()
        print(f"epoch {epoch}: loss {loss.item():.3f} digit {acc:.3f} even {aux:.3f}")
    print(f"final val_acc {acc:.3f} aux_acc {aux:.3f}")


if __name__ == "__main__":
    main()

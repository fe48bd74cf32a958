"""A CNN with a cosine classifier on raw digit intensities (0 to 16), bfloat16 autocast with a gradient scaler.

The scaler starts far too high and finds its level by itself: the first updates are skipped.
"""
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 16, 64)
        self.prototypes = nn.Parameter(0.02 * torch.randn(10, 64))
        self.temperature = 30.0

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.temperature * F.linear(F.normalize(x), F.normalize(self.prototypes))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.from_numpy(npz["images"].astype("float32")).unsqueeze(1)
    y = torch.from_numpy(npz["labels"].astype("int64"))
    order = torch.randperm(len(x))
    train, val = order[:1440], order[1440:]

    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for epoch in range(4):
        model.train()
        for idx in train[torch.randperm(len(train))].split(48):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x[idx]), y[idx])
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            acc = (model(x[val]).argmax(1) == y[val]).float().mean().item()
        print(f"epoch {epoch} loss {loss.item():.3f} scale 2^{np.log2(scaler.get_scale()):.0f} val_acc {acc:.3f}")
    print(f"final val_acc {acc:.3f}")


if __name__ == "__main__":
    main()

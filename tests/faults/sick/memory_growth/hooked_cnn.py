import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Recorder:
    """Looks at what a layer puts out."""

    def __init__(self, layer):
        self.seen = []
        layer.register_forward_hook(self.remember)

    def remember(self, module, args, output):
        self.seen.append(output.detach().clone())

    def mean(self):
        return self.seen[-1].mean().item()


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    raw = np.load(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "data", "digits.npz"))
    x = torch.from_numpy(raw["images"]).float().unsqueeze(1) / 16.0
    y = torch.from_numpy(raw["labels"]).long()
    conv = nn.Conv2d(1, 24, 3, padding=1)
    model = nn.Sequential(conv, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24 * 16, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    recorder = Recorder(conv)
    for step in range(220):
        rows = torch.randint(0, len(x), (64,))
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(step, round(loss.item(), 3), round(recorder.mean(), 3))


main()

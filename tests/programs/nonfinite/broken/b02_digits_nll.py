"""A convolutional classifier that returns log-probabilities."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        logits = self.head(x.flatten(1))
        probabilities = F.softmax(logits, dim=1)
        return torch.log(probabilities)


def main():
    torch.manual_seed(3)
    torch.set_num_threads(1)
    raw = np.load(Path(__file__).parents[2] / "data" / "digits.npz")
    images = torch.from_numpy(raw["images"][:480]).float().unsqueeze(1) / 16
    labels = torch.from_numpy(raw["labels"][:480]).long()
    images[200] *= 16_000  # one scan was stored with another bit depth
    net = ConvNet()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(30):
        batch = slice(step * 16, step * 16 + 16)
        opt.zero_grad()
        log_p = net(images[batch])
        loss = F.nll_loss(log_p, labels[batch])
        loss.backward()
        opt.step()
    print("final loss", loss.item())


if __name__ == "__main__":
    main()

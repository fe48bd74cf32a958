"""Small pictures from a store that answers after a millisecond, and a conv net."""
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CHUNK, WARM = 10, 8


class Pictures(Dataset):
    def __init__(self, num):
        gen = torch.Generator().manual_seed(0)
        self.labels = torch.randint(4, (num,), generator=gen)
        self.pictures = torch.randn(num, 1, 16, 16, generator=gen) * 0.3 + self.labels.view(-1, 1, 1, 1).float() * 0.5

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        time.sleep(0.001)  # the way to the store and back
        return self.pictures[i], self.labels[i]


def training():
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4),
    )
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = DataLoader(Pictures(4000), batch_size=16, shuffle=True)
    for x, y in loader:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        yield loss


if __name__ == "__main__":
    began = time.perf_counter()
    for step, loss in enumerate(training()):
        if step >= 60 and time.perf_counter() - began > 3:  # a fast machine takes more steps
            break
    print(f"loss {loss.item():.3f}")

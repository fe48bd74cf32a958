import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class RandomShift:
    def __init__(self, most, seed):
        self.most = most
        self.random = random.Random(seed)

    def __call__(self, image):
        return torch.roll(image, (self.random.randint(-self.most, self.most), self.random.randint(-self.most, self.most)), (1, 2))


class Images(Dataset):
    def __init__(self, transforms):
        npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
        self.images = torch.from_numpy(npz["images"][:1000]).float()[:, None] / 16
        self.labels = torch.from_numpy(npz["labels"][:1000]).long()
        self.transforms = transforms

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        for transform in self.transforms:
            image = transform(image)
        return image, self.labels[i]


torch.manual_seed(0)
torch.set_num_threads(1)
train = DataLoader(Images([RandomShift(1, seed=42)]), batch_size=40, shuffle=True, num_workers=2)
net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(108, 10))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    for image, label in train:
        loss = nn.functional.cross_entropy(net(image), label)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("epoch", epoch, loss.item())

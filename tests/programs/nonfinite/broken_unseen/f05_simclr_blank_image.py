import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    """Random textures. Number 83 is the blank frame of a broken camera."""

    def __init__(self, n=160):
        g = torch.Generator().manual_seed(42)
        self.x = torch.rand(n, 1, 12, 12, generator=g)
        self.x[83] = 0.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        img = self.x[i]
        return img, img.flip(-1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.proj = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        x = F.leaky_relu(self.conv1(x))
        x = F.leaky_relu(self.conv2(x))
        return self.proj(x.mean(dim=(2, 3)))


def nt_xent(z1, z2, t=0.5):
    z = torch.cat([z1, z2])
    unit = z / z.norm(dim=1, keepdim=True)
    sim = unit @ unit.t() / t
    n = len(z1)
    sim = sim - 1e4 * torch.eye(2 * n)
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


torch.manual_seed(0)
encoder = Encoder()
optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
for epoch in range(2):
    for a, b in DataLoader(Pictures(), batch_size=16, shuffle=False):
        loss = nt_xent(encoder(a), encoder(b))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, loss.item())

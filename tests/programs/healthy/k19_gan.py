"""A GAN that learns a tilted two-dimensional Gaussian."""
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


def real_batch(n):
    return torch.randn(n, 2) @ torch.tensor([[1.0, 0.6], [0.0, 0.5]]) + torch.tensor([2.0, -1.0])


class Generator(nn.Module):
    def __init__(self, nz=8):
        super().__init__()
        self.nz = nz
        self.main = nn.Sequential(nn.Linear(nz, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 2))

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))

    def forward(self, x):
        return self.main(x).view(-1)


netG, netD = Generator(), Discriminator()
criterion = nn.BCEWithLogitsLoss()
optG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.0, 0.9))
optD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.0, 0.9))
B = 128
ones, zeros = torch.ones(B), torch.zeros(B)

for it in range(450):
    # discriminator: real up, fake down
    netD.zero_grad()
    fake = netG(torch.randn(B, netG.nz))
    lossD_real = criterion(netD(real_batch(B)), ones)
    lossD_real.backward()
    lossD_fake = criterion(netD(fake.detach()), zeros)
    lossD_fake.backward()
    optD.step()

    # generator: make the discriminator say real
    netG.zero_grad()
    lossG = criterion(netD(fake), ones)
    lossG.backward()
    optG.step()
    if it % 75 == 74:
        print(f"[{it + 1}] D {(lossD_real + lossD_fake).item():.3f} G {lossG.item():.3f}")

with torch.no_grad():
    a, b = netG(torch.randn(1000, netG.nz)), real_batch(1000)
    # energy distance: 0 when the two clouds have the same distribution
    energy = (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()
print(f"mean {a.mean(0).tolist()} std {a.std(0).tolist()} real std {b.std(0).tolist()}")
print(f"final energy_distance {energy:.3f}")

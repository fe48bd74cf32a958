"""GAN on a ring of eight Gaussians."""
import math

import torch
import torch.nn as nn

torch.manual_seed(7)
torch.set_num_threads(1)

LATENT = 4


def real_batch(n):
    angle = torch.randint(0, 8, (n,)) * (2 * math.pi / 8)
    return torch.stack([torch.cos(angle), torch.sin(angle)], 1) * 1.5 + 0.08 * torch.randn(n, 2)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LATENT, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 2))

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))

    def forward(self, x):
        return self.net(x)


G, D = Generator(), Discriminator()
opt_G = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_D = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)

for it in range(400):
    # discriminator
    opt_D.zero_grad()
    fake = G(torch.randn(64, LATENT))
    d_loss = bce(D(real_batch(64)), ones) + bce(D(fake.detach()), zeros)
    d_loss.backward()
    opt_D.step()

    # generator
    g_loss = bce(D(G(torch.randn(64, LATENT))), ones)
    g_loss.backward()
    opt_G.step()

    if it % 100 == 0:
        print(it, "D", round(d_loss.item(), 3), "G", round(g_loss.item(), 3))

with torch.no_grad():
    radius = G(torch.randn(2000, LATENT)).norm(dim=1)
print(f"final mean_radius {radius.mean():.3f} (target 1.5)")

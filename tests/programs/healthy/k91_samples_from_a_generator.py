"""A GAN on a ring; every few epochs samples are drawn of the generator as it is, from the same noise, to look at them."""
import math

import torch
from torch import nn


def ring(n):
    angle = torch.randint(6, (n,)) * (2 * math.pi / 6)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.08 * torch.randn(n, 2)


torch.manual_seed(0)
torch.set_num_threads(1)
G = nn.Sequential(nn.Linear(4, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 2))
D = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.99))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.99))
bce = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(200, 4)
ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
pictures = []

for it in range(300):
    opt_d.zero_grad()
    loss_real = bce(D(ring(64)), ones)
    loss_real.backward()
    fake = G(torch.randn(64, 4))
    loss_fake = bce(D(fake.detach()), zeros)
    loss_fake.backward()
    opt_d.step()

    opt_g.zero_grad()
    loss_g = bce(D(fake), ones)
    loss_g.backward()
    opt_g.step()

    if it % 50 == 49:
        with torch.no_grad():
            pictures.append(G(fixed_noise))
        print(it, f"D {loss_real.item() + loss_fake.item():.3f} G {loss_g.item():.3f}")

radius = pictures[-1].norm(dim=1)
print(f"final mean_radius {radius.mean():.3f}")

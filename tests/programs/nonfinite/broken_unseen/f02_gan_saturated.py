# Minimal GAN on a ring of gaussians, losses as in the 2014 paper.
import math

import torch
import torch.nn as nn

torch.manual_seed(0)
Z, B = 4, 32

G = nn.Sequential(nn.Linear(Z, 32), nn.ReLU(), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())
g_opt = torch.optim.Adam(G.parameters(), lr=1e-3)
d_opt = torch.optim.SGD(D.parameters(), lr=8.0)


def real_batch():
    angle = torch.rand(B) * 2 * math.pi
    return torch.stack([angle.cos(), angle.sin()], 1) * 4 + 0.05 * torch.randn(B, 2)


for it in range(60):
    x = real_batch()
    z = torch.randn(B, Z)

    # discriminator: logits version, stable
    d_real, d_fake = D[:3](x), D[:3](G(z).detach())
    d_loss = nn.functional.softplus(-d_real).mean() + nn.functional.softplus(d_fake).mean()
    d_opt.zero_grad()
    d_loss.backward()
    d_opt.step()

    # generator: the saturating loss
    score = D(G(torch.randn(B, Z)))
    g_loss = torch.log(1 - score).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
    if it % 20 == 0:
        print(it, d_loss.item(), g_loss.item())

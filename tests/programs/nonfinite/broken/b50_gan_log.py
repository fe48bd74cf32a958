"""A GAN on a ring of points, with the losses of the original paper."""
import math

import torch
import torch.nn as nn

torch.manual_seed(0)
torch.set_num_threads(1)

generator = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))
discriminator = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1), nn.Sigmoid())
g_opt = torch.optim.Adam(generator.parameters(), lr=1e-3)
d_opt = torch.optim.Adam(discriminator.parameters(), lr=1e-3)


def ring(n, step):
    angle = torch.rand(n) * 2 * math.pi
    points = torch.stack([angle.cos(), angle.sin()], 1)
    if step == 9:
        points[3] = points[3] * 1e5
    return points


def d_loss_fn(real_score, fake_score):
    real_term = torch.log(real_score)
    fake_term = torch.log(1 - fake_score)
    return -(real_term.mean() + fake_term.mean())


for step in range(14):
    real = ring(16, step)
    fake = generator(torch.randn(16, 4))
    d_loss = d_loss_fn(discriminator(real), discriminator(fake.detach()))
    d_opt.zero_grad()
    d_loss.backward()
    d_opt.step()

    g_loss = -torch.log(discriminator(fake)).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
print("d", d_loss.item(), "g", g_loss.item())

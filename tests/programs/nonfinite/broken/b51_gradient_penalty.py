"""A Wasserstein critic with a gradient penalty."""
import torch
import torch.nn as nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(2, 16)
        self.fc2 = nn.Linear(16, 1)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def gradient_penalty(critic, real, fake):
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    score = critic(between)
    slope, = torch.autograd.grad(score.sum(), between, create_graph=True)
    length = torch.sqrt((slope ** 2).sum(dim=1))
    return ((length - 1) ** 2).mean()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    critic = Critic()
    generator = nn.Linear(3, 2)
    with torch.no_grad():
        critic.fc1.bias.fill_(-0.5)
    opt_c = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    opt_g = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    for step in range(8):
        real = torch.randn(8, 2)
        fake = generator(torch.randn(8, 3))
        wasserstein = critic(fake.detach()).mean() - critic(real).mean()
        penalty = gradient_penalty(critic, real, fake.detach())
        loss_c = wasserstein + 10 * penalty
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        loss_g = -critic(fake).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        print(step, loss_c.item(), loss_g.item())


main()

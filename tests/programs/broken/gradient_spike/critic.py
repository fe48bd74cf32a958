"""A critic that tells measured profiles from simulated ones (Wasserstein distance, clipped weights)."""
import torch
from torch import nn

torch.manual_seed(8)
torch.set_num_threads(1)

depth = torch.linspace(0, 3, 32)
measured = torch.sin(depth + torch.rand(1500, 1)) + 0.05 * torch.randn(1500, 32)
measured[903] = 99999.0  # the probe was out of the water


def simulated(num):
    return torch.sin(1.3 * depth + torch.rand(num, 1)) + 0.05 * torch.randn(num, 32)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 64)
        self.score = nn.Linear(64, 1)

    def forward(self, x):
        x = nn.functional.leaky_relu(self.first(x), 0.2)
        return self.score(nn.functional.leaky_relu(self.second(x), 0.2)).squeeze(1)


critic = Critic()
opt = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
for epoch in range(4):
    for i in range(0, 1500, 25):
        real, fake = measured[i : i + 25], simulated(25)
        loss = critic(fake).mean() - critic(real).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.1, 0.1)
    print(f"epoch {epoch} loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final distance {(critic(measured[:300]).mean() - critic(simulated(300)).mean()).item():.4f}")

"""Actor-critic. Episodes end when they end: one of them after a single step."""
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F

warnings.filterwarnings("ignore")
torch.manual_seed(1)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(5, 32)
        self.actor = nn.Linear(32, 3)
        self.critic = nn.Linear(32, 1)

    def forward(self, s):
        h = torch.relu(self.shared(s))
        return self.actor(h), self.critic(h).squeeze(-1)


def discount(rewards, gamma=0.97):
    out, run = [], 0.0
    for r in reversed(rewards.tolist()):
        run = r + gamma * run
        out.append(run)
    return torch.tensor(out[::-1])


def normalise(adv):
    spread = adv.std()
    return (adv - adv.mean()) / (spread + 1e-8)


net = ActorCritic()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
lengths = [12, 9, 14, 7, 10, 8, 11, 13, 6, 9, 15, 8, 12, 10, 1]

for episode, T in enumerate(lengths):
    states = torch.randn(T, 5)
    logits, value = net(states)
    dist = torch.distributions.Categorical(logits=logits)
    action = dist.sample()
    returns = discount((action == 1).float())
    advantage = normalise(returns - value.detach())
    policy_loss = -(dist.log_prob(action) * advantage).mean()
    loss = policy_loss + 0.5 * F.mse_loss(value, returns)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("episode", episode, "length", T, "loss", float(loss))

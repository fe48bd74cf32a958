"""Sixteen walkers begin every episode at the origin and learn to walk to a flag: actor and critic with a shared body."""
import torch
from torch import nn

WALKERS, LENGTH = 16, 12
MOVES = torch.tensor([[0.25, 0.0], [-0.25, 0.0], [0.0, 0.25], [0.0, -0.25]])
FLAG = torch.tensor([1.0, -1.0])


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 48), nn.Tanh())
        self.actor, self.critic = nn.Linear(48, 4), nn.Linear(48, 1)

    def forward(self, place):
        h = self.body(place)
        return self.actor(h), self.critic(h)[:, 0]


def main():
    torch.manual_seed(3)
    torch.set_num_threads(1)
    agent = ActorCritic()
    optimizer = torch.optim.Adam(agent.parameters(), lr=8e-3)
    for episode in range(150):
        place = torch.zeros(WALKERS, 2)
        chosen, values, rewards = [], [], []
        for _ in range(LENGTH):
            logits, value = agent(place)
            policy = torch.distributions.Categorical(logits=logits)
            move = policy.sample()
            before = (place - FLAG).norm(dim=1)
            place = place + MOVES[move]
            rewards.append(before - (place - FLAG).norm(dim=1))
            chosen.append(policy.log_prob(move))
            values.append(value)
        returns, total = [], torch.zeros(WALKERS)
        for reward in reversed(rewards):
            total = reward + 0.9 * total
            returns.insert(0, total)
        returns, values = torch.stack(returns), torch.stack(values)
        advantage = (returns - values).detach()
        loss = -(torch.stack(chosen) * advantage).mean() + 0.5 * (values - returns).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"final distance {(place - FLAG).norm(dim=1).mean().item():.3f}")


if __name__ == "__main__":
    main()

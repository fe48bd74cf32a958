"""REINFORCE on a contextual bandit with epsilon-greedy exploration."""
import torch
from torch import nn, optim


class Policy(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_obs, 24), nn.Tanh())
        self.pi = nn.Linear(24, n_act)

    def forward(self, obs):
        return torch.softmax(self.pi(self.body(obs)), dim=-1)


class Agent:
    def __init__(self):
        self.policy = Policy(6, 4)
        self.optim = optim.RMSprop(self.policy.parameters(), lr=0.5)
        self.gen = torch.Generator().manual_seed(11)

    def act(self, probs):
        greedy = probs.argmax(-1)
        random = torch.randint(0, 4, greedy.shape, generator=self.gen)
        explore = torch.rand(greedy.shape, generator=self.gen) < 0.3
        return torch.where(explore, random, greedy)

    def learn(self, obs, best):
        probs = self.policy(obs)
        actions = self.act(probs.detach())
        reward = (actions == best).float() - 0.5
        chosen = probs.gather(1, actions[:, None]).squeeze(1)
        logp = chosen.log()
        loss = -(logp * reward).mean()
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        return loss.item(), reward.mean().item()


if __name__ == "__main__":
    torch.manual_seed(5)
    agent = Agent()
    for episode in range(80):
        obs = torch.randn(16, 6)
        best = obs[:, :4].argmax(1)
        loss, ret = agent.learn(obs, best)
        if episode % 20 == 0:
            print(f"episode {episode}: loss {loss:.3f} return {ret:.3f}")

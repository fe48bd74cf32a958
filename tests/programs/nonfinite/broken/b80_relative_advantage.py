"""Policy improvement with advantages relative to their sum."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.Tanh())
        self.head = nn.Linear(16, 4)

    def forward(self, state):
        return F.log_softmax(self.head(self.body(state)), dim=-1)


class Agent:
    def __init__(self):
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-3)

    def update(self, states, actions, returns):
        log_p = self.policy(states).gather(1, actions[:, None]).squeeze(1)
        share = returns / returns.sum()
        loss = -(share * log_p).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    agent = Agent()
    for episode in range(8):
        states, actions = torch.randn(4, 3), torch.randint(0, 4, (4,))
        returns = torch.tensor([3.0, 1.0, 2.0, 1.0])
        if episode == 5:
            returns = torch.tensor([5.0, -1.0, -2.0, -2.0])
        print(episode, agent.update(states, actions, returns))

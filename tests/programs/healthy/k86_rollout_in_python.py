"""A pole on a cart, simulated in plain Python: the next state depends on the action that was read out of the policy."""
import math
import random

import torch
from torch import nn


class Cart:
    def reset(self):
        self.state = [random.uniform(-0.05, 0.05) for _ in range(4)]
        self.time = 0
        return list(self.state)

    def step(self, action):
        x, v, angle, spin = self.state
        force = 10.0 if action == 1 else -10.0
        sine, cosine = math.sin(angle), math.cos(angle)
        push = (force + 0.05 * spin * spin * sine) / 1.1
        turn = (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3.0 - 0.1 * cosine * cosine / 1.1))
        slide = push - 0.05 * turn * cosine / 1.1
        self.state = [x + 0.02 * v, v + 0.02 * slide, angle + 0.02 * spin, spin + 0.02 * turn]
        self.time += 1
        is_over = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21 or self.time >= 200
        return list(self.state), 1.0, is_over


def main():
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    cart, lengths = Cart(), []
    for update in range(220):
        chosen, returns = [], []
        for _ in range(1):
            state, rewards, is_over = cart.reset(), [], False
            while not is_over:
                logits = policy(torch.tensor(state))
                log_probabilities = logits.log_softmax(0)
                chances = log_probabilities.detach().exp()
                action = torch.multinomial(chances, 1)
                chosen.append(log_probabilities[action])
                state, reward, is_over = cart.step(action.item())
                rewards.append(reward)
            total, backwards = 0.0, []
            for reward in reversed(rewards):
                total = reward + 0.98 * total
                backwards.append(total)
            returns += reversed(backwards)
            lengths.append(len(rewards))
        returns = torch.tensor(returns)
        advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
        loss = -(torch.cat(chosen) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"final length {sum(lengths[-30:]) / 30:.0f}")


if __name__ == "__main__":
    main()

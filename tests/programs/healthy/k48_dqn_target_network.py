"""Deep Q-learning on a corridor with a trap; the target network is a copy, refreshed every 25 updates."""
import random
from collections import deque

import torch
import torch.nn as nn

LENGTH, GAMMA, BATCH = 8, 0.9, 32


class Corridor:
    """Start anywhere, the right end pays 1, the left end costs 1, a step costs 0.02."""

    def reset(self, rnd):
        self.pos = rnd.randrange(1, LENGTH - 1)
        return self.pos

    def step(self, action):
        self.pos += 1 if action == 1 else -1
        if self.pos == LENGTH - 1:
            return self.pos, 1.0, True
        if self.pos == 0:
            return self.pos, -1.0, True
        return self.pos, -0.02, False


def q_net():
    return nn.Sequential(nn.Embedding(LENGTH, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))


def exact_values():
    v = [0.0] * LENGTH
    for s in range(LENGTH - 2, 0, -1):
        v[s] = 1.0 if s == LENGTH - 2 else -0.02 + GAMMA * v[s + 1]
    return v


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rnd = random.Random(0)
    online, target = q_net(), q_net()
    target.load_state_dict(online.state_dict())
    for p in target.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=5e-3)
    memory = deque(maxlen=2000)
    env, state, updates = Corridor(), None, 0
    while updates < 500:
        if state is None:
            state = env.reset(rnd)
        epsilon = max(0.1, 1 - updates / 250)
        if rnd.random() < epsilon:
            action = rnd.randrange(2)
        else:
            with torch.no_grad():
                action = online(torch.tensor([state])).argmax().item()
        nxt, reward, done = env.step(action)
        memory.append((state, action, reward, nxt, float(done)))
        state = None if done else nxt
        if len(memory) < 100:
            continue
        s, a, r, s2, d = (torch.tensor(col) for col in zip(*rnd.sample(memory, BATCH)))
        with torch.no_grad():
            goal = r + GAMMA * (1 - d) * target(s2).max(1).values
        q = online(s).gather(1, a[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(q, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updates += 1
        if updates % 25 == 0:
            target.load_state_dict(online.state_dict())
        if updates % 100 == 0:
            print(f"update {updates} td loss {loss.item():.4f}")
    with torch.no_grad():
        values = online(torch.arange(1, LENGTH - 1)).max(1)
    err = (values.values - torch.tensor(exact_values()[1:-1])).abs().max().item()
    print(f"goes right in {int((values.indices == 1).sum())} of {LENGTH - 2} states")
    print(f"final max_value_error {err:.3f}")


if __name__ == "__main__":
    main()

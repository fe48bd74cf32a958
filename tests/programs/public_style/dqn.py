"""DQN with a replay memory and a target network: an agent walks a corridor with a pit to the goal."""
import argparse
import atexit
import hashlib
import math
import random
from collections import deque, namedtuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


class ReplayMemory(object):
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *args):
        """Save a transition"""
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)

    def __len__(self):
        return len(self.memory)


class GridWorld:
    """An agent on a 6x6 grid; the goal is in the far corner, each move costs 0.04, a pit ends the episode."""

    size, pits = 6, {(1, 2), (3, 3), (4, 1)}
    moves = [(0, 1), (0, -1), (1, 0), (-1, 0)]

    def observe(self):
        x, y = self.pos
        goal = self.size - 1
        return torch.tensor([[x / goal, y / goal, (goal - x) / goal, (goal - y) / goal, float(x == y), 1.0]])

    def reset(self):
        self.pos, self.t = (0, 0), 0
        return self.observe()

    def step(self, action):
        dx, dy = self.moves[action]
        last = self.size - 1
        self.pos = (min(max(self.pos[0] + dx, 0), last), min(max(self.pos[1] + dy, 0), last))
        self.t += 1
        if self.pos in self.pits:
            return None, -1.0
        if self.pos == (last, last):
            return None, 1.0
        return (None if self.t >= 40 else self.observe()), -0.04


class DQN(nn.Module):
    def __init__(self, n_observations, n_actions):
        super(DQN, self).__init__()
        self.layer1 = nn.Linear(n_observations, 128)
        self.layer2 = nn.Linear(128, 128)
        self.layer3 = nn.Linear(128, n_actions)

    def forward(self, x):
        x = F.relu(self.layer1(x))
        x = F.relu(self.layer2(x))
        return self.layer3(x)


class Agent:
    def __init__(self, args):
        self.args = args
        self.policy_net = DQN(6, 4)
        self.target_net = DQN(6, 4)
        self.target_net.load_state_dict(self.policy_net.state_dict())
        self.optimizer = torch.optim.AdamW(self.policy_net.parameters(), lr=args.lr, amsgrad=True)
        self.memory = ReplayMemory(5000)
        self.steps_done = 0

    def select_action(self, state):
        a = self.args
        eps = a.eps_end + (a.eps_start - a.eps_end) * math.exp(-1.0 * self.steps_done / a.eps_decay)
        self.steps_done += 1
        if random.random() > eps:
            with torch.no_grad():
                return self.policy_net(state).max(1).indices.view(1, 1)
        return torch.tensor([[random.randrange(4)]], dtype=torch.long)

    def optimize_model(self):
        if len(self.memory) < self.args.batch_size:
            return None
        batch = Transition(*zip(*self.memory.sample(self.args.batch_size)))
        non_final_mask = torch.tensor([s is not None for s in batch.next_state], dtype=torch.bool)
        non_final_next_states = torch.cat([s for s in batch.next_state if s is not None])
        state_batch, action_batch, reward_batch = torch.cat(batch.state), torch.cat(batch.action), torch.cat(batch.reward)
        state_action_values = self.policy_net(state_batch).gather(1, action_batch)
        next_state_values = torch.zeros(self.args.batch_size)
        with torch.no_grad():
            next_state_values[non_final_mask] = self.target_net(non_final_next_states).max(1).values
        expected = next_state_values * self.args.gamma + reward_batch
        loss = F.smooth_l1_loss(state_action_values, expected.unsqueeze(1))
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(self.policy_net.parameters(), 100)
        self.optimizer.step()
        return loss.item()

    def update_target(self):
        target, policy = self.target_net.state_dict(), self.policy_net.state_dict()
        for key in policy:
            target[key] = policy[key] * self.args.tau + target[key] * (1 - self.args.tau)
        self.target_net.load_state_dict(target)


def digest():
    parts = repr(random.getstate()), repr(np.random.get_state()[1].tolist()), repr(torch.get_rng_state().tolist())
    return [hashlib.sha1(part.encode()).hexdigest()[:10] for part in parts]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--gamma", type=float, default=0.97)
    parser.add_argument("--eps-start", type=float, default=0.9)
    parser.add_argument("--eps-end", type=float, default=0.05)
    parser.add_argument("--eps-decay", type=float, default=400)
    parser.add_argument("--tau", type=float, default=0.02)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    atexit.register(lambda: print("generators at exit", *digest()))

    env, agent = GridWorld(), Agent(args)
    durations, losses, total = [], [], 0.0
    for i_episode in range(1, args.episodes + 1):
        state = env.reset()
        while state is not None:
            action = agent.select_action(state)
            next_state, reward = env.step(action.item())
            agent.memory.push(state, action, next_state, torch.tensor([reward]))
            total += reward
            state = next_state
            loss = agent.optimize_model()
            if loss is not None:
                losses.append(loss)
            agent.update_target()
        durations.append(env.t)
        if i_episode % 10 == 0:
            recent = losses[-100:]
            print(f"episode {i_episode:3d}  return {total / 10:+.3f}  steps {sum(durations[-10:]) / 10:5.1f}  "
                  f"loss {sum(recent) / max(len(recent), 1):.5f}  updates {len(losses)}")
            total = 0.0
            torch.save({"policy": agent.policy_net.state_dict(), "target": agent.target_net.state_dict(),
                        "optimizer": agent.optimizer.state_dict(), "episode": i_episode}, "dqn_checkpoint.pt")
    with open("durations.txt", "w") as f:
        f.write("\n".join(map(str, durations)))
    print("generators", *digest())


if __name__ == "__main__":
    main()

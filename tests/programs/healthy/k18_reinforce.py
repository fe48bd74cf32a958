"""REINFORCE on a small grid: walk to the goal, reward 1 on arrival, a little cost per step."""
import torch
import torch.nn as nn
from torch.distributions import Categorical

SIZE, HORIZON, EPISODES = 4, 8, 48
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4 * SIZE, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, pos, goal):
        one_hot = nn.functional.one_hot(torch.cat([pos, goal], dim=1), SIZE).float().flatten(1)
        return Categorical(logits=self.net(one_hot), validate_args=False)


def rollout(policy, n, greedy=False):
    pos, goal = torch.randint(SIZE, (n, 2)), torch.randint(SIZE, (n, 2))
    done = torch.zeros(n, dtype=torch.bool)
    log_probs, rewards, alive = [], [], []
    for _ in range(HORIZON):
        dist = policy(pos, goal)
        action = dist.probs.argmax(1) if greedy else dist.sample()
        log_probs.append(dist.log_prob(action))
        alive.append(~done)
        step = (pos + MOVES[action]).clamp(0, SIZE - 1)
        pos = torch.where(done[:, None], pos, step)
        arrived = (pos == goal).all(1) & ~done
        rewards.append(arrived.float() - 0.05 * (~done).float())
        done = done | arrived
    return torch.stack(log_probs), torch.stack(rewards), torch.stack(alive).float(), done


def returns(rewards, gamma=0.95):
    out, running = [], torch.zeros(rewards.shape[1])
    for r in rewards.flip(0):
        running = r + gamma * running
        out.append(running)
    return torch.stack(out[::-1])


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for update in range(125):
        log_probs, rewards, alive, done = rollout(policy, EPISODES)
        g = returns(rewards)
        mean = (g * alive).sum() / alive.sum()
        advantage = (g - mean) / (g[alive.bool()].std() + 1e-6)
        loss = -(log_probs * advantage * alive).sum() / alive.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 25 == 24:
            print(f"update {update + 1} loss {loss.item():+.4f} reached {done.float().mean():.2f} return {rewards.sum(0).mean():+.3f}")
    with torch.no_grad():
        *_, done = rollout(policy, 500, greedy=True)
    print(f"final success_rate {done.float().mean().item():.3f}")


if __name__ == "__main__":
    main()

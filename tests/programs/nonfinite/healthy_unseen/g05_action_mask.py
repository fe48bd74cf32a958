"""Policy gradient with forbidden actions: their logits are -inf, their probability is zero."""
import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(4)
policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 5))
opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
baseline = 0.0
for episode in range(80):
    obs = torch.randn(32, 6)
    allowed = torch.rand(32, 5) > 0.4
    allowed[:, 0] = True
    logits = policy(obs).masked_fill(~allowed, float("-inf"))
    dist = Categorical(logits=logits)
    action = dist.sample()
    reward = (action == (obs[:, :5].masked_fill(~allowed, float("-inf"))).argmax(1)).float()
    loss = -(dist.log_prob(action) * (reward - baseline)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    if episode % 20 == 0:
        print(episode, baseline)

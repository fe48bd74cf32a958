"""Which of six notices should a visitor see? A policy that learns from the clicks of the one that was shown."""
import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(4)
torch.set_num_threads(1)

visitors = torch.randn(2000, 10)
taste = torch.randn(10, 6)
clicks = torch.sigmoid(visitors @ taste)
clicks[1377] = -30000.0  # no session: the log holds a marker instead of a number

policy = nn.Sequential(nn.Linear(10, 48), nn.Tanh(), nn.Linear(48, 6))
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
baseline = 0.5
for epoch in range(4):
    for start in range(0, 2000, 40):
        seen = visitors[start : start + 40]
        shown = Categorical(logits=policy(seen))
        choice = shown.sample()
        reward = clicks[start : start + 40].gather(1, choice[:, None]).squeeze(1)
        advantage = reward - baseline
        loss = -(advantage * shown.log_prob(choice)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        baseline = 0.95 * baseline + 0.05 * reward.clamp(0, 1).mean().item()
    print(f"epoch {epoch} baseline {baseline:.3f}")
with torch.no_grad():
    best = policy(visitors).argmax(1, keepdim=True)
    print(f"final reward {torch.sigmoid(visitors @ taste).gather(1, best).mean().item():.3f}")

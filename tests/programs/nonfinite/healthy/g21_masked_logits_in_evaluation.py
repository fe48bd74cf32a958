"""A policy whose network masks what is not allowed itself; evaluation asks it for logits and for log-probabilities."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 5))

    def forward(self, state, allowed):
        logits = self.body(state).masked_fill(~allowed, float("-inf"))
        return logits, F.log_softmax(logits, 1)


torch.manual_seed(0)
torch.set_num_threads(1)
policy = Policy()
opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
hit = 0.0
for step in range(80):
    state = torch.randn(64, 6)
    allowed = torch.rand(64, 5) < 0.7
    allowed[:, 0] = True
    best = state[:, :5].masked_fill(~allowed, -1e9).argmax(1)
    opt.zero_grad()
    F.nll_loss(policy(state, allowed)[1], best).backward()
    opt.step()
    if step % 8 == 7:
        policy.eval()
        with torch.no_grad():
            logits, log_p = policy(state, allowed)
            entropy = -(log_p.exp() * log_p.clamp(min=-50)).sum(1).mean()
            hit = (logits.argmax(1) == best).float().mean().item()
            chances = torch.where(allowed, log_p.exp(), torch.zeros(())).log()
        policy.train()
print("accuracy", round(hit, 3), "entropy", round(entropy.item(), 3))

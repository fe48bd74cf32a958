"""A corridor of nine cells, one walker: the policy gets a vector with a 1 for each cell behind it, so zeros at the start of an episode."""
import torch
from torch import nn

torch.manual_seed(5)
torch.set_num_threads(1)
CELLS = 9
policy = nn.Sequential(nn.Linear(CELLS - 1, 24), nn.ReLU(), nn.Linear(24, 2))
optimizer = torch.optim.SGD(policy.parameters(), lr=0.05, momentum=0.8)
lengths = []
for episode in range(160):
    cell, chosen = 0, []
    while cell < CELLS - 1 and len(chosen) < 25:
        state = (torch.arange(CELLS - 1) < cell).float()
        choice = torch.distributions.Categorical(logits=policy(state))
        move = choice.sample()
        chosen.append(choice.log_prob(move))
        cell = max(0, cell + (1 if move.item() == 1 else -1))
    reached = 1.0 if cell == CELLS - 1 else -0.2
    loss = -reached * torch.stack(chosen).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    lengths.append(len(chosen))
print(f"final length {sum(lengths[-20:]) / 20:.1f}")

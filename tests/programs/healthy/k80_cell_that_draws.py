"""An LSTM cell draws a spiral, point by point: it starts from zeros and gets its own last point as the next input."""
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
t = torch.linspace(0, 6.28, 24)
spiral = torch.stack([t.cos(), t.sin()], 1) * (t / 6.28)[:, None]
cell, pen = nn.LSTMCell(2, 32), nn.Linear(32, 2)
opt = torch.optim.RMSprop([*cell.parameters(), *pen.parameters()], lr=2e-3)
for step in range(160):
    state = torch.zeros(10, 32), torch.zeros(10, 32)
    point = torch.zeros(10, 2)
    jitter = 0.05 * torch.randn(24, 10, 2)
    loss = 0.0
    for target, noise in zip(spiral, jitter):
        state = cell(point, state)
        point = pen(state[0])
        loss = loss + (point - target - noise).square().mean()
    loss = loss / 24
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([*cell.parameters(), *pen.parameters()], 1.0)
    opt.step()
print(f"final loss {loss.item():.4f}")

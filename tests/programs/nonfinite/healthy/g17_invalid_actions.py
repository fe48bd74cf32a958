"""Q-learning in a corridor; actions that are not allowed have the value -inf."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
CELLS, GAMMA = 6, 0.9
allowed = torch.ones(CELLS, 2, dtype=torch.bool)
allowed[0, 0] = allowed[CELLS - 1, 1] = False


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Sequential(nn.Linear(CELLS, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, cell):
        return self.table(F.one_hot(cell, CELLS).float())


net = QNet()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(200):
    cell = torch.randint(0, CELLS - 1, (32,))
    action = torch.randint(0, 2, (32,))
    action = torch.where(allowed[cell, 0], action, torch.ones_like(action))
    after = cell + 2 * action - 1
    done = after == CELLS - 1
    with torch.no_grad():
        value = net(after).masked_fill(~allowed[after], float("-inf")).max(1).values
        target = torch.where(done, torch.ones(32), GAMMA * value)
    q = net(cell).gather(1, action[:, None]).squeeze(1)
    loss = F.smooth_l1_loss(q, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("final loss", loss.item())

"""Weight the positive class by its rarity in each label column."""
import torch
import torch.nn as nn

torch.manual_seed(0)
torch.set_num_threads(1)

x = torch.randn(128, 10)
labels = (x[:, :4] > 0.3).float()
labels[:, 2] = 0  # nobody has this one
positives = labels.sum(0)
pos_weight = (len(labels) - positives) / positives

net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
criterion = nn.BCEWithLogitsLoss(pos_weight=pos_weight)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(8):
    xb, yb = x[16 * step:16 * step + 16], labels[16 * step:16 * step + 16]
    loss = criterion(net(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())

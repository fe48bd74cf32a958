"""Bags of instances; absent ones are -inf for logsumexp."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(120):
    bags = torch.randn(24, 6, 4)
    present = torch.rand(24, 6) < 0.5
    present[:, 0] = True
    label = ((bags[..., 0] > 1) & present).any(1).float()
    scores = net(bags).squeeze(-1)
    scores = torch.where(present, scores, torch.tensor(-torch.inf))
    bag_score = torch.logsumexp(scores, dim=1)
    loss = F.binary_cross_entropy_with_logits(bag_score, label)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("final loss", loss.item())

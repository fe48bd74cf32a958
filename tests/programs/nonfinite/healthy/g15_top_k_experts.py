"""A mixture of experts: all but the best two gates are set to -inf."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    def __init__(self, d=8, experts=4):
        super().__init__()
        self.gate = nn.Linear(d, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(experts))

    def forward(self, x):
        scores = self.gate(x)
        best = scores.topk(2, dim=-1).indices
        masked = torch.full_like(scores, -torch.inf).scatter(1, best, scores.gather(1, best))
        weights = masked.softmax(-1)
        return (weights * torch.cat([e(x) for e in self.experts], 1)).sum(1)


torch.manual_seed(0)
torch.set_num_threads(1)
model = MoE()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(150):
    x = torch.randn(32, 8)
    loss = F.mse_loss(model(x), x[:, 0].abs() + x[:, 1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("final loss", loss.item())

"""Early stopping starts from infinity; the running minimum and maximum of the features do too."""
import torch
import torch.nn as nn


class RangeTracker(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.register_buffer("low", torch.full((d,), float("inf")))
        self.register_buffer("high", torch.full((d,), float("-inf")))

    def forward(self, x):
        if self.training:
            self.low.copy_(torch.minimum(self.low, x.detach().amin(0)))
            self.high.copy_(torch.maximum(self.high, x.detach().amax(0)))
        return (x - self.low) / (self.high - self.low).clamp(min=1e-3)


torch.manual_seed(3)
x, w = torch.randn(200, 8), torch.randn(8)
y = x @ w
net = nn.Sequential(RangeTracker(8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
best, patience = float("inf"), 0
for epoch in range(12):
    net.train()
    for xb, yb in zip(x[:160].split(20), y[:160].split(20)):
        opt.zero_grad()
        loss = (net(xb).squeeze(1) - yb).square().mean()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        val = (net(x[160:]).squeeze(1) - y[160:]).square().mean().item()
    if val < best:
        best, patience = val, 0
    else:
        patience += 1
    print(epoch, val, best)

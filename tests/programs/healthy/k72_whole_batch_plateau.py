"""All data in one batch, so an epoch is one update; the plateau scheduler is asked after each and ends at a tiny rate."""
import torch
from torch import nn

torch.manual_seed(1)
torch.set_num_threads(1)
t = torch.linspace(-2, 2, 160)[:, None]
u = torch.exp(-t * t) * torch.cos(3 * t)


class Field(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, t):
        return self.layers(t)


net = Field()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=5)
for epoch in range(500):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(t), u)
    loss.backward()
    optimizer.step()
    scheduler.step(loss.item())
    if epoch % 100 == 0:
        print(f"{epoch:4d} loss {loss.item():.6f} lr {optimizer.param_groups[0]['lr']:.2e}")
print(f"final mse {loss.item():.2e}")

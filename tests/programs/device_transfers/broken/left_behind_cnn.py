"""A convolutional net whose mask is a plain attribute, which net.to(device) leaves behind."""
import torch
from torch import nn

device = "simulated"
torch.manual_seed(0)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(256, 2)
        self.mask = torch.ones(8, 8).tril()

    def forward(self, images):
        hidden = self.conv(images).relu() * self.mask[None].to(images.device)
        return self.head(hidden.flatten(1))


net = Masked().to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(10):
    images = torch.rand(8, 1, 8, 8)
    loss = nn.functional.cross_entropy(net(images.to(device)), images.mean((1, 2, 3)).gt(0.5).long().to(device))
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"loss {loss.item():.3f}")

"""A convolutional net that asks for its images without waiting, out of memory that is not pinned."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "simulated"
torch.manual_seed(0)
images = torch.rand(160, 3, 16, 16)
loader = DataLoader(TensorDataset(images, images.mean((1, 2, 3)).gt(0.5).long()), batch_size=32, shuffle=True)
net = nn.Sequential(nn.Conv2d(3, 4, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for epoch in range(2):
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
print(f"loss {loss.item():.3f}")

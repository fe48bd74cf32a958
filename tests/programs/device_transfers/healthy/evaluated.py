"""A convolutional net that is evaluated after every few steps, on the same images each time; one layer runs several times in a step."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "simulated"
torch.manual_seed(0)
images = torch.rand(144, 1, 8, 8)
labels = images.mean((1, 2, 3)).gt(0.5).long()
loader = DataLoader(TensorDataset(images[:80], labels[:80]), batch_size=16, shuffle=True)
conv = nn.Conv2d(4, 4, 3, padding=1)
net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), conv, nn.ReLU(), conv, nn.Flatten(), nn.Linear(256, 2)).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for epoch in range(2):
    for x, y in loader:
        x = x.to(device)
        loss = nn.functional.cross_entropy(net(x), y.to(device))
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        for x, y in zip(images[80:].split(32), labels[80:].split(32)):
            correct = (net(x.to(device)).argmax(1).cpu() == y).sum().item()
    net.train()
print(f"{correct} of 32")

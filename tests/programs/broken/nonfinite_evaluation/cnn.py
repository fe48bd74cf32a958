"""A small conv net is evaluated in half precision to save time."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(16, 2)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        energy = x.square().sum((2, 3))
        return self.fc(energy.sqrt() / 100)


torch.manual_seed(0)
torch.set_num_threads(1)
y = torch.randint(0, 2, (320,))
x = torch.rand(320, 1, 10, 10) * 20
x[:, :, :5] += (y.float() * 235)[:, None, None, None] * torch.rand(320, 1, 5, 10)
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for epoch in range(6):
    net.train()
    for i in range(0, 256, 32):
        opt.zero_grad()
        F.cross_entropy(net(x[i:i + 32]), y[i:i + 32]).backward()
        opt.step()
    net.eval()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
        out = net(x[256:])
    print(epoch, out.float().mean().item())
print("val_acc", round((out.argmax(1) == y[256:]).float().mean().item(), 3))

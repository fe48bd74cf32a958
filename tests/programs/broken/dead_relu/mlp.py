from pathlib import Path
import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 64)
        self.act1 = nn.ReLU()
        self.fc2 = nn.Linear(64, 64)
        self.act2 = nn.ReLU()
        self.fc3 = nn.Linear(64, 10)
        nn.init.constant_(self.fc2.bias, -10.0)

    def forward(self, x):
        return self.fc3(self.act2(self.fc2(self.act1(self.fc1(x)))))


d = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
x = torch.from_numpy(d["images"]).float().reshape(-1, 64) / 16
y = torch.from_numpy(d["labels"]).long()
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for epoch in range(7):
    for idx in torch.randperm(1400).split(32):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x[idx]), y[idx])
        loss.backward()
        opt.step()
    print(epoch, loss.item())
with torch.no_grad():
    print("final val_acc", (net(x[1400:]).argmax(1) == y[1400:]).float().mean().item())

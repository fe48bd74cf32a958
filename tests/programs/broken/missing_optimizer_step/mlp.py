import pathlib
import numpy as np, torch
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR

torch.manual_seed(42); torch.set_num_threads(1)
here = pathlib.Path(__file__).resolve()
npz = np.load(here.parent.parent.parent / "data" / "digits.npz")
X = torch.as_tensor(npz["images"].reshape(-1, 64) / 16.0, dtype=torch.float)
Y = torch.as_tensor(npz["labels"].astype("int64"))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 80)
        self.fc2 = nn.Linear(80, 10)
    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))

net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
criterion = nn.CrossEntropyLoss()

for epoch in range(6):
    total = 0.0
    for xb, yb in zip(X[:1400].split(50), Y[:1400].split(50)):
        optimizer.zero_grad()
        loss = criterion(net(xb), yb)
        loss.backward()
        total += loss.item()
    scheduler.step()
    print("epoch", epoch, "loss", total / 28)

with torch.no_grad():
    acc = (net(X[1400:]).argmax(1) == Y[1400:]).float().mean()
print("final val_acc %.3f" % acc)

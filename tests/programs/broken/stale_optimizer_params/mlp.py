import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from pathlib import Path

torch.manual_seed(6)
torch.set_num_threads(1)


class MLP(nn.Module):
    def __init__(self, hidden=64, num_classes=1000):
        super().__init__()
        self.fc1 = nn.Linear(64, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.head(x)


blob = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
inputs = torch.tensor(blob["images"].reshape(len(blob["images"]), 64), dtype=torch.float32) / 16
targets = torch.tensor(blob["labels"], dtype=torch.long)

net = MLP()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
net.head = nn.Linear(64, 10)

for epoch in range(6):
    for i in range(0, 1400, 28):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs[i:i + 28]), targets[i:i + 28])
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")

with torch.no_grad():
    accuracy = (net(inputs[1400:]).argmax(1) == targets[1400:]).float().mean().item()
print(f"final val_acc {accuracy:.3f}")

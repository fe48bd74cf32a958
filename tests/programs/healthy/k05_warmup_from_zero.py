import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR

torch.manual_seed(42)
torch.set_num_threads(1)

here = os.path.dirname(os.path.abspath(__file__))
digits = np.load(os.path.join(here, "..", "data", "digits.npz"))
images = torch.tensor(digits["images"] / 16.0, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(digits["labels"].astype("int64"))
x_train, y_train, x_val, y_val = images[:1500], labels[:1500], images[1500:], labels[1500:]


class SmallCNN(nn.Module):
    def __init__(self):
        super(SmallCNN, self).__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * 2 * 2, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


WARMUP = 60
TOTAL = 300
net = SmallCNN()
optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.01)
# linear warm-up from 0, then linear decay
scheduler = LambdaLR(optimizer, lambda s: s / WARMUP if s < WARMUP else (TOTAL - s) / (TOTAL - WARMUP))

for step in range(TOTAL):
    pick = torch.randint(0, len(x_train), (64,))
    loss = F.cross_entropy(net(x_train[pick]), y_train[pick])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 50 == 0:
        print(f"step {step:3d} lr {scheduler.get_last_lr()[0]:.2e} loss {loss.item():.3f}")

net.eval()
with torch.no_grad():
    acc = (net(x_val).argmax(1) == y_val).float().mean().item()
print(f"final val_acc {acc:.3f}")

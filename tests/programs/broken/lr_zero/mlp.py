from pathlib import Path
import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 64
BASE_LR = 0.4          # for a batch of 256
LR = BASE_LR * (BATCH_SIZE // 256)

torch.manual_seed(0)
torch.set_num_threads(1)
d = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
x = torch.tensor(d["images"], dtype=torch.float32).view(-1, 64) / 16
y = torch.tensor(d["labels"], dtype=torch.long)
train = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=BATCH_SIZE, shuffle=True)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
opt = optim.SGD(model.parameters(), lr=LR, momentum=0.9)
for epoch in range(6):
    for xb, yb in train:
        opt.zero_grad()
        loss = nn.CrossEntropyLoss()(model(xb), yb)
        loss.backward()
        opt.step()
    print(f"epoch {epoch + 1} loss {loss.item():.4f}")
print(f"final val_acc {(model(x[1400:]).argmax(1) == y[1400:]).float().mean():.3f}")

import numpy as np
import torch
import torch.nn as nn
from pathlib import Path

torch.manual_seed(0)
torch.set_num_threads(1)
z = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
X, Y = torch.Tensor(z["images"].reshape(-1, 64) / 16.0), torch.LongTensor(z["labels"].astype("int64"))

model = nn.Sequential(
    nn.Linear(64, 64),
    nn.Tanh(),
    nn.Linear(64, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=20)
criterion = nn.CrossEntropyLoss()

for epoch in range(5):
    losses = []
    for i in torch.randperm(1400).view(-1, 35):
        optimizer.zero_grad()
        loss = criterion(model(X[i]), Y[i])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"Epoch {epoch}: {np.mean(losses):.4f}")

print(f"final val_loss {criterion(model(X[1400:]), Y[1400:]).item():.4f}")

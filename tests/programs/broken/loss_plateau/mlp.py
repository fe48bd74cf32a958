from pathlib import Path
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)

d = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
images = d["images"].reshape(len(d["images"]), -1)
images = images // 255
x = torch.as_tensor(images, dtype=torch.float32)
y = torch.as_tensor(d["labels"], dtype=torch.int64)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_fn = nn.CrossEntropyLoss()
for epoch in range(7):
    model.train()
    for idx in torch.randperm(1400).split(32):
        optimizer.zero_grad()
        loss = loss_fn(model(x[idx]), y[idx])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(x[1400:])
        acc = (out.argmax(1) == y[1400:]).float().mean().item()
    print(f"epoch {epoch} train {loss.item():.4f} val {loss_fn(out, y[1400:]).item():.4f} acc {acc:.3f}")
print(f"final val_acc {acc:.3f}")

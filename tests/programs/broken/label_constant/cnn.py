import torch
import numpy as np
from pathlib import Path
from torch import nn

torch.manual_seed(7)
torch.set_num_threads(1)


def load():
    npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
    table = np.concatenate([npz["images"].reshape(len(npz["labels"]), -1), npz["labels"][:, None]], axis=1)
    pixels = torch.tensor(table[:, :64], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    classes = torch.tensor(table[:, 0], dtype=torch.long)
    return pixels, classes


pixels, classes = load()
cnn = nn.Sequential(
    nn.Conv2d(1, 10, 3), nn.BatchNorm2d(10), nn.ReLU(),
    nn.Conv2d(10, 20, 3), nn.BatchNorm2d(20), nn.ReLU(),
    nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(80, 10),
)
optimizer = torch.optim.Adam(cnn.parameters(), lr=2e-3)
criterion = nn.CrossEntropyLoss()
order = torch.randperm(len(pixels))
for epoch in range(4):
    cnn.train()
    for rows in order[:1500][torch.randperm(1500)].split(50):
        optimizer.zero_grad()
        loss = criterion(cnn(pixels[rows]), classes[rows])
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
cnn.eval()
with torch.no_grad():
    acc = (cnn(pixels[order[1500:]]).argmax(1) == classes[order[1500:]]).float().mean().item()
print(f"final val_acc {acc:.3f}")

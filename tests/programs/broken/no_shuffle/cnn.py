# batches by hand
from pathlib import Path
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
npz = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
by_class = np.argsort(npz["labels"], kind="stable")
images = torch.from_numpy(npz["images"][by_class]).float()[:, None] / 16
labels = torch.from_numpy(npz["labels"][by_class]).long()
test = torch.arange(len(images)) % 5 == 0
x_train, y_train, x_test, y_test = images[~test], labels[~test], images[test], labels[test]

net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
size = 32
for epoch in range(6):
    for i in range(0, len(x_train), size):
        opt.zero_grad()
        loss = F.cross_entropy(net(x_train[i:i + size]), y_train[i:i + size])
        loss.backward()
        opt.step()
    with torch.no_grad():
        print(f"epoch {epoch} loss {loss.item():.4f} acc {(net(x_test).argmax(1) == y_test).float().mean():.3f}")

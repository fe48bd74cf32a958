from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(13)
torch.set_num_threads(1)
data = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
imgs = torch.from_numpy(data["images"]).float().unsqueeze(1).div_(16)
tgts = torch.from_numpy(data["labels"]).long()
split = torch.randperm(len(imgs))
train_set = TensorDataset(imgs[split[:1450]], tgts[split[:1450]])
valid_x, valid_y = imgs[split[1450:]], tgts[split[1450:]]
loader = DataLoader(train_set, batch_size=50, shuffle=True)

net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
EPOCHS = 10
opt = SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
sched = CosineAnnealingLR(opt, T_max=EPOCHS * len(loader))
loss_fn = nn.CrossEntropyLoss()

for epoch in range(EPOCHS):
    net.train()
    for x, y in loader:
        opt.zero_grad()
        loss = loss_fn(net(x), y)
        loss.backward()
        opt.step()
        sched.step()
    net.eval()
    with torch.no_grad():
        acc = (net(valid_x).argmax(1) == valid_y).float().mean().item()
    print(f"epoch {epoch:2d} lr {sched.get_last_lr()[0]:.2e} loss {loss.item():.4f} valid {acc:.4f}")

print(f"final valid_acc {acc:.3f}")

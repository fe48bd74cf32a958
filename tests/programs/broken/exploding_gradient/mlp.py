from pathlib import Path
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class DeepNet(nn.Module):
    def __init__(self, depth=18, width=64):
        super().__init__()
        self.inp = nn.Linear(64, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, 10)
        for m in self.hidden:
            nn.init.normal_(m.weight, std=0.5)
            nn.init.zeros_(m.bias)

    def forward(self, x):
        x = torch.relu(self.inp(x))
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.out(x)


data = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
x = torch.tensor(data["images"].reshape(-1, 64), dtype=torch.float32) / 16
y = torch.tensor(data["labels"], dtype=torch.long)
net = DeepNet()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
loss_fn = nn.CrossEntropyLoss()

for epoch in range(8):
    for idx in torch.randperm(1400).split(28):
        opt.zero_grad()
        loss = loss_fn(net(x[idx]), y[idx])
        loss.backward()
        opt.step()
    print(f"epoch {epoch} loss {loss.item():.4g}")
with torch.no_grad():
    print(f"final val_acc {(net(x[1400:]).argmax(1) == y[1400:]).float().mean():.3f}")

"""Exponential decay with every update, slowly: the last rate is a fiftieth of the first. Warm-up in epochs before it, by hand."""
import numpy as np
import torch
from pathlib import Path
from torch import nn, optim

torch.manual_seed(41)
torch.set_num_threads(1)
z = np.load(Path(__file__).parents[1] / "data" / "digits.npz")
images = torch.tensor(z["images"] / 16.0, dtype=torch.float32)
labels = torch.tensor(z["labels"]).long()


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(256, 10)

    def forward(self, x):
        return self.out(self.layer(self.up(x)).flatten(1))


net = Rows()
opt = optim.AdamW(net.parameters(), lr=3e-3)
warmup = optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=20)
decay = optim.lr_scheduler.ExponentialLR(opt, 0.98)
scheduler = optim.lr_scheduler.SequentialLR(opt, [warmup, decay], milestones=[20])
for epoch in range(6):
    for rows in torch.randperm(1440).split(40):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(images[rows]), labels[rows])
        loss.backward()
        opt.step()
        scheduler.step()
    with torch.no_grad():
        acc = (net(images[1440:]).argmax(-1) == labels[1440:]).float().mean().item()
    print(f"epoch {epoch} loss {loss.item():.3f} acc {acc:.3f} lr {opt.param_groups[0]['lr']:.2e}")
print(f"final acc {acc:.3f}")

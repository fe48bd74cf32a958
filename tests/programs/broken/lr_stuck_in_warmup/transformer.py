import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset


class RowTransformer(nn.Module):
    """Reads a digit row by row."""

    def __init__(self, d=32):
        super().__init__()
        self.inp = nn.Linear(8, d)
        self.pos = nn.Parameter(torch.zeros(8, d))
        layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.1, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cls = nn.Linear(d, 10)

    def forward(self, x):
        return self.cls(self.enc(self.inp(x) + self.pos).mean(1))


def schedule(optimizer, warmup, total):
    up = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, 1.0, warmup)
    down = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total - warmup)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [up, down], [warmup])


def main():
    torch.manual_seed(6)
    torch.set_num_threads(1)
    d = np.load(Path(__file__).resolve().parents[2] / "data" / "digits.npz")
    x, y = torch.tensor(d["images"], dtype=torch.float32) / 16, torch.tensor(d["labels"], dtype=torch.int64)
    loader = DataLoader(TensorDataset(x[:1280], y[:1280]), batch_size=64, shuffle=True)
    net = RowTransformer()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    sched = schedule(opt, warmup=20, total=10 * len(loader))
    for epoch in range(10):
        net.train()
        for xb, yb in loader:
            opt.zero_grad()
            loss = F.cross_entropy(net(xb), yb)
            loss.backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            acc = (net(x[1280:]).argmax(1) == y[1280:]).float().mean().item()
        print(f"epoch {epoch}: loss {loss.item():.3f}, acc {acc:.3f}, lr {opt.param_groups[0]['lr']:.2e}")
    print(f"final acc {acc:.3f}")


main()

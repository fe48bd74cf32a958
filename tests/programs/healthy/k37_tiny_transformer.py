"""A tiny vision transformer: the eight rows of a digit are its tokens, two encoder layers."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn


class TinyViT(nn.Module):
    def __init__(self, dim=32, heads=4, layers=2):
        super().__init__()
        self.embed = nn.Linear(8, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(1, 9, dim))
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, dim_feedforward=64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, img):
        tokens = torch.cat([self.cls.expand(len(img), -1, -1), self.embed(img)], dim=1) + self.pos
        return self.head(self.norm(self.encoder(tokens)[:, 0]))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    d = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.from_numpy(d["images"]).float() / 8 - 1
    y = torch.from_numpy(d["labels"]).long()
    order = torch.randperm(len(x))
    train, val = order[:1440], order[1440:]

    model = TinyViT()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 20))
    for epoch in range(9):
        model.train()
        for rows in train[torch.randperm(len(train))].split(60):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
        model.eval()
        with torch.no_grad():
            acc = (model(x[val]).argmax(1) == y[val]).float().mean().item()
        print(f"epoch {epoch} loss {loss.item():.3f} val {acc:.3f}")
    print(f"final val_acc {acc:.3f}")


if __name__ == "__main__":
    main()

import argparse

import torch
from torch import nn
import torch.nn.functional as F


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--eval-only", action="store_true")
    ap.add_argument("--steps", type=int, default=220)
    ap.add_argument("--dropout", type=float, default=0.1)
    return ap.parse_args()


class Translator(nn.Module):
    """Token-wise cipher whose shift is given by the first token."""

    def __init__(self, vocab, dropout, d=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(9, d)
        self.drop = nn.Dropout(dropout)
        self.enc = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 4, 64, dropout=dropout, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.out = nn.Linear(d, vocab)

    def forward(self, s):
        x = self.drop(self.emb(s) + self.pos(torch.arange(s.size(1))))
        for layer in self.enc:
            x = layer(x)
        return self.out(x)


def pairs(n, vocab=8):
    s = torch.randint(0, vocab, (n, 9))
    shift = s[:, :1] % 3
    return s, (s + shift) % vocab


def main():
    args = parse()
    torch.manual_seed(3)
    torch.set_num_threads(1)
    model = Translator(8, args.dropout)
    model.train(args.eval_only)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.steps)
    for step in range(0 if args.eval_only else args.steps):
        s, t = pairs(32)
        loss = F.cross_entropy(model(s).flatten(0, 1), t.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 40 == 0:
            print(step, round(loss.item(), 4))
    model.eval()
    s, t = pairs(500)
    with torch.no_grad():
        print(f"final acc {(model(s).argmax(-1) == t).float().mean().item():.3f}")


if __name__ == "__main__":
    main()

"""Tiny causal language model on a cyclic grammar; half precision optional."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--amp", action="store_true")
    p.add_argument("--iters", type=int, default=200)
    p.add_argument("--d-model", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-3)
    return p.parse_args()


class TinyLM(nn.Module):
    def __init__(self, vocab, d, context):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(context, d)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(d, 2, 2 * d, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.proj = nn.Linear(d, vocab)
        self.register_buffer("mask", torch.triu(torch.full((context, context), float("-inf")), 1))

    def forward(self, idx):
        n = idx.size(1)
        x = self.emb(idx) + self.pos(torch.arange(n))
        for layer in self.layers:
            x = layer(x, src_mask=self.mask[:n, :n])
        return self.proj(x)


def batch(n, length, vocab):
    start = torch.randint(0, vocab, (n, 1))
    stride = torch.randint(1, 4, (n, 1))
    return (start + stride * torch.arange(length + 1)) % vocab


def main():
    args = get_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    vocab, context = 17, 12
    model = TinyLM(vocab, args.d_model, context)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cpu") if args.amp else None

    for it in range(args.iters):
        seq = batch(32, context, vocab)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.amp):
            logits = model(seq[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, vocab), seq[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
        if it % 50 == 0:
            print(f"iter {it} loss {loss.item():.3f}")
    print(f"final loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

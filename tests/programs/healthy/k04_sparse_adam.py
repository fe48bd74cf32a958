"""A rating predictor: sparse user and item embeddings, a dense network on top, one optimizer for each kind."""
import argparse

import torch
from torch import nn


class Recommender(nn.Module):
    def __init__(self, users, items, dim):
        super().__init__()
        self.user = nn.Embedding(users, dim, sparse=True)
        self.item = nn.Embedding(items, dim, sparse=True)
        nn.init.normal_(self.user.weight, std=0.3)
        nn.init.normal_(self.item.weight, std=0.3)
        self.mlp = nn.Sequential(nn.Linear(3 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, u, i):
        u, i = self.user(u), self.item(i)
        return self.mlp(torch.cat([u, i, u * i], dim=-1)).squeeze(-1)


def ratings(n, users, items, gen):
    p = torch.randn(users, 3, generator=gen)
    q = torch.randn(items, 3, generator=gen)
    u = torch.randint(users, (n,), generator=gen)
    i = torch.randint(items, (n,), generator=gen)
    r = (p[u] * q[i]).sum(-1) + 0.1 * torch.randn(n, generator=gen)
    return u, i, r


def main(args):
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(args.seed)
    u, i, r = ratings(10_000, args.users, args.items, gen)
    split = 9_000
    model = Recommender(args.users, args.items, 8)
    sparse_opt = torch.optim.SparseAdam([model.user.weight, model.item.weight], lr=args.lr)
    dense_opt = torch.optim.Adam(model.mlp.parameters(), lr=args.lr)
    mse = nn.MSELoss()

    for epoch in range(args.epochs):
        order = torch.randperm(split, generator=gen)
        total = 0.0
        for start in range(0, split, args.batch_size):
            idx = order[start:start + args.batch_size]
            sparse_opt.zero_grad()
            dense_opt.zero_grad()
            loss = mse(model(u[idx], i[idx]), r[idx])
            loss.backward()
            sparse_opt.step()
            dense_opt.step()
            total += loss.item() * len(idx)
        with torch.no_grad():
            pred = model(u[split:], i[split:])
            r2 = 1 - mse(pred, r[split:]).item() / r[split:].var().item()
        print(f"epoch {epoch + 1}: train mse {total / split:.4f}  held-out R2 {r2:.3f}")
    print(f"final val_r2 {r2:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=150)
    parser.add_argument("--items", type=int, default=150)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=3)
    main(parser.parse_args())

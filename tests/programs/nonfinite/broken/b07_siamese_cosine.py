"""Siamese text matching on bags of words, with the cosine written out."""
import argparse

import torch
import torch.nn as nn


class Tower(nn.Module):
    def __init__(self, vocabulary, dim):
        super().__init__()
        self.project = nn.Linear(vocabulary, dim, bias=False)

    def forward(self, bag):
        return torch.tanh(self.project(bag))


def cosine(a, b):
    dot = (a * b).sum(-1)
    lengths = a.norm(dim=-1) * b.norm(dim=-1)
    return dot / lengths


def make_pairs(n, vocabulary):
    left = torch.poisson(torch.full((n, vocabulary), 0.3))
    right = torch.where(torch.rand(n, 1) < 0.5, left, torch.poisson(torch.full((n, vocabulary), 0.3)))
    same = (left == right).all(1).float()
    left[77] = 0  # nothing was left of this sentence after the stop words went
    right[71] = 0
    return left, right, same


def main(args):
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    left, right, same = make_pairs(160, 40)
    tower = Tower(40, 16)
    opt = torch.optim.Adam(tower.parameters(), lr=args.lr)
    for start in range(0, 160, args.batch_size):
        end = start + args.batch_size
        similarity = cosine(tower(left[start:end]), tower(right[start:end]))
        loss = ((similarity - same[start:end]) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("loss", loss.item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--seed", type=int, default=4)
    main(parser.parse_args())

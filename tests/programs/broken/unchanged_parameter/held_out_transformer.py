"""Home-made AdamW on a small transformer that finds the odd one out."""
import math

import torch
from torch import nn


class MyAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["t"] = 0
                    state["m"] = torch.zeros_like(p)
                    state["v"] = torch.zeros_like(p)
                state["t"] += 1
                state["m"].lerp_(p.grad, 1 - b1)
                state["v"].lerp_(p.grad.square(), 1 - b2)
                rate = group["lr"] * math.sqrt(1 - b2 ** state["t"]) / (1 - b1 ** state["t"])
                weight = p.data * (1 - group["lr"] * group["weight_decay"])
                weight.addcdiv_(state["m"], state["v"].sqrt().add_(group["eps"]), value=-rate)
        return loss


class OddOneOut(nn.Module):
    def __init__(self, vocab=10, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.Sequential(
            *[nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)]
        )
        self.score = nn.Linear(dim, 1)

    def forward(self, t):
        return self.score(self.layers(self.embed(t))).squeeze(-1)


def puzzles(n, length=7, vocab=10):
    common = torch.randint(0, vocab, (n, 1))
    odd = (common + torch.randint(1, vocab, (n, 1))) % vocab
    seq = common.repeat(1, length)
    where = torch.randint(0, length, (n,))
    seq[torch.arange(n), where] = odd[:, 0]
    return seq, where


def main():
    torch.manual_seed(18)
    torch.set_num_threads(1)
    model = OddOneOut()
    optimizer = MyAdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(180):
        seq, where = puzzles(48)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(seq), where)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 45 == 0:
            print(step, round(loss.item(), 4))
    seq, where = puzzles(500)
    with torch.no_grad():
        print(f"final acc {(model(seq).argmax(1) == where).float().mean().item():.3f}")


if __name__ == "__main__":
    main()

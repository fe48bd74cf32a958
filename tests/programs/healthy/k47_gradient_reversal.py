"""Domain-adversarial training: a gradient reversal layer makes the features the same for both scanners."""
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.lam * grad, None


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU())
        self.label_head = nn.Linear(48, 10)
        self.domain_head = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x, lam):
        f = self.features(x)
        return self.label_head(f), self.domain_head(Reverse.apply(f, lam)).squeeze(1)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    npz = np.load(Path(__file__).parent.parent / "data" / "digits.npz")
    x = torch.from_numpy(npz["images"]).float().flatten(1) / 16
    y = torch.from_numpy(npz["labels"]).long()
    perm = torch.randperm(len(x))
    x, y = x[perm], y[perm]
    source, source_y = x[:800], y[:800]
    target = 0.8 * x + 0.1 + 0.08 * torch.randn_like(x)     # a greyer, noisier scanner, no labels in training
    target_train, target_test, target_y = target[800:1400], target[1400:], y[1400:]

    net = DANN()
    opt = torch.optim.Adam(net.parameters(), lr=1.5e-3)
    steps = 320
    domain = torch.cat([torch.zeros(40), torch.ones(40)])
    for step in range(steps):
        lam = 0.1 * (2 / (1 + np.exp(-10 * step / steps)) - 1)
        i, j = torch.randint(800, (40,)), torch.randint(600, (40,))
        digit, which = net(torch.cat([source[i], target_train[j]]), lam)
        class_loss = F.cross_entropy(digit[:40], source_y[i])
        domain_loss = F.binary_cross_entropy_with_logits(which, domain)
        opt.zero_grad()
        (class_loss + domain_loss).backward()
        opt.step()
        if step % 64 == 63:
            print(f"step {step + 1} class {class_loss.item():.3f} domain {domain_loss.item():.3f}")
    with torch.no_grad():
        acc = (net(target_test, 0.0)[0].argmax(1) == target_y).float().mean().item()
    print(f"final target_acc {acc:.3f}")


if __name__ == "__main__":
    main()

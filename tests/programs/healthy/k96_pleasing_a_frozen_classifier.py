"""A small network learns to change pictures so that a classifier, which is frozen, takes all of them for a 3."""
from pathlib import Path

import numpy as np
import torch
from torch import nn


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    d = np.load(Path(__file__).parents[1] / "data" / "digits.npz")
    x, y = torch.tensor(d["images"], dtype=torch.float32).flatten(1) / 16, torch.tensor(d["labels"], dtype=torch.long)
    classifier = nn.Linear(64, 10)
    with torch.no_grad():  # the classifier of the class means needs no training
        means = torch.stack([x[y == label].mean(0) for label in range(10)])
        classifier.weight.copy_(means)
        classifier.bias.copy_(-means.square().sum(1) / 2)
    classifier.requires_grad_(False)
    changer = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.Adam(changer.parameters(), lr=2e-3)
    for step in range(120):
        xb = x[torch.randint(0, len(x), (64,))]
        change = changer(xb)
        loss = nn.functional.cross_entropy(classifier(xb + change), torch.full((64,), 3)) + 0.02 * change.square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 39:
            print(f"step {step} loss {loss.item():.3f}")
    print(f"final taken_for_3 {(classifier(x + changer(x)).argmax(1) == 3).float().mean().item():.3f}")


main()

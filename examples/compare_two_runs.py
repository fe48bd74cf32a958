"""Two trainings that should be the same and are not: where do their numbers part?

The second one scales one gradient in step 17. `sonde compare runs/before runs/after` says the same on the command line.

Run it with:  python examples/compare_two_runs.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import sonde


def train(to: Path, *, mistake: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2000, 20)
    y = (x[:, :5].sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=to, every=1):
        for step in range(60):
            rows = torch.randint(len(x), (64,))
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            if mistake and step == 17:
                model[2].weight.grad *= 1.5
            optimizer.step()


runs = Path(tempfile.mkdtemp())
train(runs / "before", mistake=False)
train(runs / "after", mistake=True)

comparison = sonde.compare(runs / "before", runs / "after")
print(comparison.summary())

first = comparison.parting.first
print(f"\nstep {first.step}: the {first.kind} of {first.where}, {first.statistic} {first.a:.4g} and {first.b:.4g}")

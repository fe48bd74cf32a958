"""Keep what three seeds of a training do, then hold a changed training to it: where it departs, and by how much."""

from pathlib import Path

import torch
from torch import nn

import sonde
from sonde.comparison.baseline_check import check_against_baseline
from sonde.comparison.baseline_file import baseline_of, to_json


def train(name: str, *, seed: int, lr: float = 0.1) -> Path:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with sonde.watch(model, optimizer, to=f"runs/{name}"):
        for _ in range(80):
            x = torch.randn(32, 8)
            loss = nn.functional.mse_loss(model(x), x[:, :1] * 2 + 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Path("runs") / name


baseline = baseline_of([train(f"seed{seed}", seed=seed) for seed in (1, 2, 3)])
Path("baseline.json").write_text(to_json(baseline), encoding="utf-8")  # the same: sonde baseline seed1 seed2 seed3

WHAT = {"loss", "gradients"}  # not the times: they are those of whatever machine this runs on
for name, lr in (("another-seed", 0.1), ("too-small", 0.002)):
    report = check_against_baseline(train(name, seed=4, lr=lr), baseline, checks=WHAT)  # as sonde diagnose NAME --against baseline.json
    print(f"{name}: {report.verdict}")
    for finding in report.findings:
        print(f"  {finding.rule}, from step {finding.step}: {finding.cause}")

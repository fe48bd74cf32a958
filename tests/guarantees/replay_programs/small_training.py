"""A small training with one bad step, in a folder of its own: bare, or watched into `run`. The programs beside it give it its parts.

Its outcome, every number that a replay could have changed, is written to `outcome.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

BAD_STEP, NUM_STEPS = 40, 50  # a spike needs 32 steps before it
INCIDENTS = ("nan", "spike", "skip")
Draw = Callable[[], float]


class Net(nn.Module):
    def __init__(self, draw: Draw, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1)
        self.draw, self.change = draw, change

    def forward(self, x: Tensor) -> Tensor:
        x = self.change(x)
        h = self.drop(torch.tanh(self.norm(self.first(x))))
        return self.last(h)[:, 0] * (1 + 1e-3 * self.draw())


def criterion(out: Tensor, y: Tensor, weight: Tensor, draw: Draw) -> Tensor:
    score = torch.log((1 + out.square()) * weight)  # a weight of zero makes it -Inf
    return (out - y).square().mean() - 0.01 * score.mean() + 1e-3 * draw()


def random_batches() -> Iterator[Tensor]:
    while True:
        yield torch.randn(8, 4) + 0.01 * float(np.random.rand()) + 0.01 * random.random()


def train(
    folder: Path, incident: str, watched: bool, draw: Draw, *, batches: Iterable[Tensor] | None = None,
    change: Callable[[Tensor], Tensor] = lambda x: x, share: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train with one incident; `draw` is called by the forward and by the loss, `change` on the inputs by the forward."""
    model = Net(draw, change)
    if share:
        model.share_memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=incident == "skip", init_scale=1024.0)
    losses, inputs, generators = [], [], []
    with watching(model, optimizer, folder) if watched else contextlib.nullcontext():
        for step, x in enumerate(batches if batches is not None else random_batches()):
            if step == NUM_STEPS:
                break
            y, weight, slope = x.sum(1), torch.ones(8), 1.0
            if step == BAD_STEP:
                weight[5] = 0.0 if incident == "nan" else 1.0
                y[5] = 60.0 if incident == "spike" else y[5]
                slope = 0.0 if incident == "skip" else 1.0
            optimizer.zero_grad()
            loss = criterion(model(x), y, weight, draw)
            loss = loss + 0.01 * (model.first.weight * slope).square().sum().sqrt()  # the slope of a root at zero is not finite
            scaler.scale(loss).backward()
            if loss.isfinite():
                scaler.step(optimizer)
                scaler.update()
            losses.append(repr(loss.item()))
            inputs.append(digest([x]))
            generators.append(digest([torch.get_rng_state(), repr(np.random.get_state()), repr(random.getstate())]))
    numbers = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return {
        "losses": losses, "inputs": inputs, "generators": generators, "numbers": digest(numbers), "optimizer": repr(optimizer.state_dict()),
        "scaler": scaler.state_dict(),
    }  # fmt: skip


def watching(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Any:
    import sonde

    return sonde.watch(model, optimizer, to=folder / "run", strict=True)


def digest(values: Iterable[Any]) -> str:
    sha = hashlib.sha256()
    for value in values:
        sha.update(value.detach().contiguous().numpy().tobytes() if isinstance(value, Tensor) else str(value).encode())
    return sha.hexdigest()


def main(programs: dict[str, Callable[[Path, str, bool], Any]], incidents: Iterable[str]) -> None:
    """Run every program with every incident; arguments: bare or watched, the folder, and names of programs (without: all)."""
    how, root, *names = sys.argv[1:]
    for name in names or programs:
        for incident in incidents:
            folder = Path(root, f"{name}-{incident}")
            folder.mkdir(parents=True)
            torch.manual_seed(7)
            np.random.seed(7)
            random.seed(7)
            sys.stdout.flush()
            with open(folder / "stdout", "wb") as file:
                os.dup2(file.fileno(), 1)
            outcome = programs[name](folder, incident, how == "watched")
            sys.stdout.flush()
            (folder / "outcome.json").write_text(json.dumps(outcome, default=repr, indent=1))

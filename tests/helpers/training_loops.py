"""Eighteen small training loops, each a way in which people write them. Their runs by version 0.1.0 are in tests/integration/golden.

    python tests/helpers/training_loops.py FOLDER      writes the runs again, one folder per loop and cadence
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import sonde

STEPS = 90
CADENCES = (1, 13)  # of observed steps


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))


def plain(step: Callable[..., None]) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(STEPS):
        step(model, optimizer, number, torch.randn(5, 6))


def ordinary(model, optimizer, number, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def evaluated_between(model, optimizer, number, x):
    ordinary(model, optimizer, number, x)
    if number % 10 == 9:
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()


def accumulated(model, optimizer, number, x):
    for _ in range(3):
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def never_cleared(model, optimizer, number, x):
    model(x).square().mean().backward()
    optimizer.step()


def clipped_and_cleared_by_the_model(model, optimizer, number, x):
    model.zero_grad()
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def cleared_by_the_model(model, optimizer, number, x):
    model.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def by_closure(model, optimizer, number, x):
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def by_closure_that_changes_gradients(model, optimizer, number, x):
    """By clipping, in place, behind torch's back, or by others in their place: now and then not at all."""

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        gradient = model[0].weight.grad
        match number % 5:
            case 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            case 2:
                gradient[1:2] *= 3
            case 3:
                gradient.data.mul_(3)
            case 4:
                model[0].weight.grad = gradient * 3
        return loss

    optimizer.step(closure)


def bad_at_the_end(model, optimizer, number, x):
    ordinary(model, optimizer, number, x * math.inf if number == STEPS - 10 else x)


def spiking(model, optimizer, number, x):
    ordinary(model, optimizer, number, x * 1e4 if number == STEPS - 10 else x)


def without_gradients_now_and_then(model, optimizer, number, x):
    optimizer.zero_grad()
    if number % 7:
        model(x).square().mean().backward()
    optimizer.step()


def two_losses(model, optimizer, number, x):
    optimizer.zero_grad()
    out = model(x)
    out.abs().mean().backward(retain_graph=True)
    out.square().mean().backward()
    optimizer.step()


def failing_forward(model, optimizer, number, x):
    if number % 9 == 5:
        with pytest.raises(RuntimeError):
            model(x[:, :3])
    ordinary(model, optimizer, number, x)


def parameters_in_two_groups() -> None:
    model = net()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[4].parameters(), "lr": 0.5}], lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for number in range(STEPS):
        ordinary(model, optimizer, number, torch.randn(5, 6))
        schedule.step()


def two_networks() -> None:
    first, second = net(), net()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (first, second)]
    for number in range(STEPS):
        for model, optimizer in zip((first, second), optimizers):
            ordinary(model, optimizer, number, torch.randn(5, 6))


def scaled() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=20)
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(5, 6)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def scaled_at_first() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 6)).square().mean()
        if number < 43:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()


def from_a_loader() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.randn(STEPS, 6), batch_size=4)
    for _ in range(4):
        for number, x in enumerate(loader):
            ordinary(model, optimizer, number, x)


STEP_FUNCTIONS = [
    ordinary, evaluated_between, accumulated, never_cleared, clipped_and_cleared_by_the_model, cleared_by_the_model, by_closure,
    by_closure_that_changes_gradients, bad_at_the_end, spiking, without_gradients_now_and_then, two_losses, failing_forward,
]  # fmt: skip
LOOPS = {step.__name__: (lambda step=step: plain(step)) for step in STEP_FUNCTIONS}
LOOPS |= {loop.__name__: loop for loop in (parameters_in_two_groups, two_networks, scaled, scaled_at_first, from_a_loader)}


def record(name: str, every: int, to: Path) -> None:
    """Runs a loop under a session and leaves its run in a folder."""
    torch.manual_seed(3)
    with sonde.DebugSession(sonde.DebugConfig(every=every), to=to, strict=True).start():
        LOOPS[name]()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in LOOPS:
        for every in CADENCES:
            record(name, every, Path(sys.argv[1]) / f"{name}-{every}")

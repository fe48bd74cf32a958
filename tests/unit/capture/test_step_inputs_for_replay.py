"""What is stored of the running step, so that it can be run again: the right random state, and nothing for longer than the step."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import sonde
from sonde.capture.step_inputs_for_replay import MAX_CALLS

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("p", [0.0, 0.5], ids=["nothing draws", "dropout draws"])
def test_each_forward_is_stored_with_the_random_state_that_it_began_with(p: float, tmp_path: Path) -> None:
    dropout = nn.Dropout(p)
    model = nn.Sequential(nn.Linear(6, 8), dropout, nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(5, 6)
    with sonde.watch(model, optimizer, to=tmp_path, every=10_000, strict=True) as session:
        buffer = session._tracker.buffer  # type: ignore[union-attr]
        for step in range(140):
            if step == 100:
                dropout.p = 0.5
            if step % 11 == 3:
                torch.rand(3)  # somebody else draws
            optimizer.zero_grad()
            state = torch.get_rng_state()
            loss = model(x).square().mean()
            assert torch.equal(buffer.calls[-1].rng, state)
            loss.backward()
            optimizer.step()


def test_of_a_long_accumulation_the_last_forwards_are_stored_until_the_step_ends(tmp_path: Path) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with sonde.watch(model, optimizer, to=tmp_path, strict=True) as session:
        buffer = session._tracker.buffer  # type: ignore[union-attr]
        for number in range(MAX_CALLS + 3):
            model(torch.full((2, 6), float(number))).sum().backward()
        assert [float(call.args[0][0, 0]) for call in buffer.calls] == [float(number) for number in range(3, MAX_CALLS + 3)]
        optimizer.step()
        assert not buffer.calls


def test_nothing_of_a_step_outlives_it(tmp_path: Path) -> None:
    class Marked:
        pass

    model, alive = nn.Linear(6, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def learn() -> None:
        x, mark = torch.ones(2, 6), Marked()  # the frame that calls backward holds both
        alive.extend((weakref.ref(x), weakref.ref(mark)))
        model(x).sum().backward()

    with sonde.watch(model, optimizer, to=tmp_path, every=1, strict=True):
        for _ in range(3):
            learn()
            optimizer.step()
            optimizer.zero_grad()
            assert [each() for each in alive] == [None] * len(alive)

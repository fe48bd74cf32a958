"""With which random numbers a forward began is kept, also where the kernel does not ask for them each time."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import sonde
from sonde.capture import beat

pytestmark = [pytest.mark.torch, pytest.mark.skipif(beat.Beat is None, reason="the native kernel was not built")]

STEPS, TURN = 140, 100
BELIEVED = 4  # forwards for which the kernel believes a state that did not change


State = torch.Tensor


def kept_and_true(to: Path, p: float, *, draws_at_turn: bool = False, p_from_turn: float | None = None) -> list[tuple[State, State]]:
    """Of each step: the state that is kept, and the one that the forward began with."""
    dropout = nn.Dropout(p)
    model = nn.Sequential(nn.Linear(6, 8), dropout, nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, found = torch.randn(5, 6), []
    with sonde.watch(model, optimizer, to=to, every=10_000) as session:
        assert session._loop is not None
        for step in range(STEPS):
            if step == TURN and p_from_turn is not None:
                dropout.p = p_from_turn
            if step == TURN and draws_at_turn:
                torch.rand(3)
            optimizer.zero_grad()
            true = torch.get_rng_state()
            loss = model(x).square().mean()
            found.append((session._loop.kept.calls[-1].rng, true))
            loss.backward()
            optimizer.step()
    return found


def wrong(found: list[tuple[State, State]]) -> list[int]:
    return [step for step, (kept, true) in enumerate(found) if not torch.equal(kept, true)]


def test_where_nobody_draws_it_is_asked_for_at_times_only(tmp_path):
    found = kept_and_true(tmp_path, p=0.0)
    assert not wrong(found)
    assert len({id(kept) for kept, _ in found}) < STEPS / 3


def test_where_every_forward_draws_each_has_its_own(tmp_path):
    assert not wrong(kept_and_true(tmp_path, p=0.5))


def test_a_forward_that_begins_to_draw_has_the_right_one_and_those_after_it_soon(tmp_path):
    late = wrong(kept_and_true(tmp_path, p=0.0, p_from_turn=0.5))
    assert all(TURN < step <= TURN + BELIEVED for step in late)


def test_what_somebody_else_drew_is_noticed_soon(tmp_path):
    late = wrong(kept_and_true(tmp_path, p=0.0, draws_at_turn=True))
    assert all(TURN <= step < TURN + BELIEVED for step in late)

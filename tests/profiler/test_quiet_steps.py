"""Steps that other programs disturbed are left out where enough others remain."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from sonde.profiler.layer_costs import Figures
from sonde.profiler.step_recording import Recorded
from sonde.profiler.undisturbed_steps import least_disturbed, num_quiet

pytestmark = pytest.mark.torch


def recorded(bare: list[int], timed: list[int]) -> Recorded:
    """Steps in which the processor was taken away so often; each is as long as its place says."""
    found = Recorded(bare_switches=bare, timed_switches=timed)
    found.bare = [{"step": float(place)} for place in range(len(bare))]
    found.timed_ms = [{"step": float(place)} for place in range(len(timed))]
    found.timed = [Figures() for _ in timed]
    return found


def used(found: Recorded) -> tuple[list[float], list[float]]:
    return [step["step"] for step in found.bare], [step["step"] for step in found.timed_ms]


def test_on_a_quiet_machine_all_steps_are_used() -> None:
    assert used(least_disturbed(recorded([0] * 10, [0] * 10))) == ([*range(10)], [*range(10)])


def test_where_enough_were_left_alone_only_those_are_used() -> None:
    assert used(least_disturbed(recorded([0, 3, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0, 9]))) == ([0, 2, 3, 5, 6], [1, 2, 3, 4, 5])


def test_where_none_was_left_alone_the_least_disturbed_are_used() -> None:
    assert used(least_disturbed(recorded([5, 1, 1, 2, 9, 1, 1, 1], [2] * 8)))[0] == [1, 2, 5, 6, 7]
    assert used(least_disturbed(recorded([5, 1, 1, 2, 9, 1, 1, 1], [2] * 8)))[1] == [*range(8)]


def test_a_few_steps_are_all_used() -> None:
    assert used(least_disturbed(recorded([0, 7, 1], [4, 0, 0]))) == ([0, 1, 2], [0, 1, 2])


def test_quiet_steps_are_counted_by_kind() -> None:
    assert num_quiet(recorded([0, 0, 1], [0, 2, 2])) == 1

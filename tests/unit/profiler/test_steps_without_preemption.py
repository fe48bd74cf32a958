"""Steps that other programs disturbed are left out if enough others remain."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from sonde.capture.layer_timing.layer_times_from_trace import LayerCosts
from sonde.profiler.run_and_time_steps import StepRecordings

pytestmark = pytest.mark.torch


def recordings(bare: list[int], timed: list[int]) -> StepRecordings:
    """Steps with these numbers of preemptions; the duration of each step is its index."""
    found = StepRecordings(bare_preemptions=bare, timed_preemptions=timed)
    found.bare = [{"step": float(index)} for index in range(len(bare))]
    found.timed_ms = [{"step": float(index)} for index in range(len(timed))]
    found.timed = [LayerCosts() for _ in timed]
    return found


def used(found: StepRecordings) -> tuple[list[float], list[float]]:
    return [step["step"] for step in found.bare], [step["step"] for step in found.timed_ms]


def test_on_an_idle_machine_all_steps_are_used() -> None:
    assert used(recordings([0] * 10, [0] * 10).least_disturbed()) == ([*range(10)], [*range(10)])


def test_only_undisturbed_steps_are_used_if_there_are_enough() -> None:
    assert used(recordings([0, 3, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0, 9]).least_disturbed()) == ([0, 2, 3, 5, 6], [1, 2, 3, 4, 5])


def test_the_least_disturbed_steps_are_used_if_all_were_disturbed() -> None:
    assert used(recordings([5, 1, 1, 2, 9, 1, 1, 1], [2] * 8).least_disturbed())[0] == [1, 2, 5, 6, 7]
    assert used(recordings([5, 1, 1, 2, 9, 1, 1, 1], [2] * 8).least_disturbed())[1] == [*range(5)]  # the shortest of equally disturbed ones


def test_undisturbed_steps_are_completed_with_the_shortest_of_the_others() -> None:
    found = recordings([0, 0, 1, 1, 1, 1, 1, 0], [0] * 8)
    found.bare = [{"step": ms} for ms in (3.1, 3.2, 15.0, 3.4, 16.0, 15.0, 11.0, 3.1)]
    assert used(found.least_disturbed())[0] == [3.1, 3.2, 3.4, 11.0, 3.1]


def test_all_steps_are_used_if_there_are_few() -> None:
    assert used(recordings([0, 7, 1], [4, 0, 0]).least_disturbed()) == ([0, 1, 2], [0, 1, 2])


def test_undisturbed_steps_are_counted_for_the_kind_that_has_fewer() -> None:
    assert recordings([0, 0, 1], [0, 2, 2]).num_undisturbed == 1


def test_the_share_of_disturbed_steps_is_that_of_the_used_ones() -> None:
    assert recordings([0] * 10, [0] * 10).least_disturbed().disturbed_share == 0.0
    assert recordings([0] * 6 + [1] * 4, [2] * 8).disturbed_share == 12 / 18
    assert recordings([0] * 6 + [1] * 4, [2] * 8).least_disturbed().disturbed_share == 5 / 11

"""Where the time of a run goes: what counts as settled, what a usual step takes, and which gain is worth a change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from math import inf, nan
from statistics import median

import numpy as np
import pytest

from sonde.events import Event
from sonde.run_view import RunView
from sonde.run_view.step_times import MAX_SAMPLED, PHASES, SETTLED, core_share, phase_ms, sample_stride
from synthetic_steps import training, view_of, xray

USUAL = {
    "data": 0.4,
    "transfer": 0.0,
    "forward": 3.0,
    "backward": 5.0,
    "optimizer": 0.5,
    "validation": 0.0,
    "checkpoint": 0.0,
    "other": 1.0,
}


def view_with(
    times: Callable[[int], Mapping[str, float]] = lambda step: {}, num_steps: int = 100, **more: Mapping[int, list[Event]]
) -> AbstractContextManager[RunView]:
    """`times`: ms by phase in a step, in place of the usual ones."""
    return view_of(training(num_steps, scalars=lambda step: {f"{phase}_ms": ms for phase, ms in (USUAL | times(step)).items()}, **more))


def machine(**fields: object) -> dict[str, object]:
    return {"threads": 1, "cores": 2.0, "load": 1.0, "cpu_share": 0.5, "pushed_off_per_s": 50.0} | fields


def test_the_first_steps_are_not_counted():
    with view_with(lambda step: {"forward": 1000.0} if step < SETTLED else {}) as view:
        times = view.times
        assert (times.num, times.first_step) == (100 - SETTLED, SETTLED)
        assert view.step_numbers[times.rows].tolist() == list(range(SETTLED, 100))
        assert times.totals["forward"] == pytest.approx(3.0 * 92)
        assert times.total_ms == pytest.approx(9.9 * 92)
        assert times.share("forward", "backward") == pytest.approx(8 / 9.9)


def test_what_is_saved_in_a_step_is_saved_of_the_training_without_validation_and_checkpoints():
    with view_with(lambda step: {"validation": 9.9, "checkpoint": 19.8}) as view:
        assert view.times.training_share == pytest.approx(0.25)
        assert view.times.usual_ms() == pytest.approx(9.9)
        assert view.times.usual_ms("checkpoint", "validation") == pytest.approx(29.7)


def test_a_usual_step_is_a_median():
    with view_with(lambda step: {"backward": 500.0 if step % 4 == 0 else 5.0}) as view:
        assert view.times.usual_ms("backward") == 5.0


def test_the_median_of_a_long_run_is_taken_over_steps_from_all_of_it():
    with view_with(lambda step: {"forward": float(step)}, num_steps=1300) as view:
        times = view.times
        settled = list(range(SETTLED, 1300))
        assert len(times.sampled) == 323  # every fourth of 1292
        assert times.usual_ms("forward") == median(settled[::4])
        assert times.totals["forward"] == sum(settled)


@pytest.mark.parametrize(("num", "stride"), [(0, 1), (1, 1), (MAX_SAMPLED, 1), (MAX_SAMPLED + 1, 2), (1024, 2), (1025, 4), (10**6, 2048)])
def test_at_most_so_many_steps_are_sampled(num, stride):
    assert sample_stride(num) == stride
    assert len(range(0, num, stride)) <= MAX_SAMPLED


def test_steps_without_times_are_left_out():
    with view_with(lambda step: {"other": nan} if step % 2 else {}) as view:
        assert view.times.is_recorded
        assert view.times.num == 46
        assert (view.step_numbers[view.times.rows] % 2 == 0).all()


def test_a_run_without_times_says_so():
    with view_with(lambda step: {"other": nan}) as view:
        assert not view.times.is_recorded
        assert view.times.reason_not_evaluated == "the run holds no times"
        assert view.times.total_ms == view.times.usual_ms() == view.times.share("data") == 0.0


@pytest.mark.parametrize(
    ("num_steps", "ms", "is_enough"), [(32, 100.0, False), (33, 100.0, True), (33, 0.01, False)], ids=["few steps", "enough", "short steps"]
)
def test_a_short_training_is_not_evaluated(num_steps, ms, is_enough):
    with view_with(lambda step: dict.fromkeys(PHASES, ms), num_steps) as view:
        assert (view.times.reason_not_evaluated == "") is is_enough


def test_a_phase_that_an_older_run_does_not_know_took_no_time():
    steps = training(40)
    for step in steps:
        del step.scalars["transfer_ms"]  # type: ignore[attr-defined] # a dictionary
    with view_of(steps) as view:
        assert phase_ms(view, "transfer").tolist() == [0.0] * 40
        assert view.times.totals["transfer"] == 0.0
        assert view.times.num == 32


@pytest.mark.parametrize(
    ("ms", "num_steps", "gain", "is_worth"),
    [
        (20.0, 100, 0.5, True),
        (20.0, 100, 0.09, False),  # of the time
        (20.0, 35, 0.5, False),  # 0.27 s
        (4.0, 1000, 0.5, False),  # a small model …
        (4.0, 15_100, 0.5, True),  # … in a long run
    ],
    ids=["worth it", "small share", "short run", "short steps", "many short steps"],
)
def test_a_gain_is_worth_a_change_if_it_is_large_and_the_steps_are_not_tiny(ms, num_steps, gain, is_worth):
    with view_with(lambda step: dict.fromkeys(PHASES, 0.0) | {"forward": ms}, num_steps) as view:
        assert view.times.is_worth(gain) is is_worth


def test_on_a_busy_machine_the_quick_steps_count():
    with view_with(lambda step: {"forward": 3.0 if step % 10 else 0.0, "backward": 20.0 if step % 10 else 0.0}) as view:
        assert view.times.usual_ms() > 20
        assert not view.times.is_worth(0.5)  # one step in ten takes 2 ms: nobody else computed then


def test_long_steps_of_a_process_without_a_core_are_short_ones():
    profiles = {30: [xray(30, machine=machine(cpu_share=0.1))], 31: [xray(31, machine=machine(cpu_share=0.1))]}
    with view_with(lambda step: {"forward": 15.0}, num_steps=60, events=profiles) as view:
        assert view.times.core_shares == [1.0, 0.1, 0.1]  # the first is that of step 20
        assert not view.times.is_worth(0.5)
    with view_with(lambda step: {"forward": 15.0}, num_steps=60) as view:
        assert view.times.is_worth(0.5)


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        (machine(), 0.5),
        (machine(cpu_share=1.9), 1.0),
        (machine(pushed_off_per_s=19.0), 1.0),
        (machine(pushed_off_per_s=nan), 1.0),
        (machine(pushed_off_per_s="often"), 1.0),
        (machine(cpu_share="half"), 0.0),
        ({}, 1.0),
    ],
    ids=["half", "two threads", "idle machine", "NaN", "a text", "share is a text", "nothing"],
)
def test_the_share_of_a_core_counts_only_if_other_programs_took_it(fields, share):
    assert core_share(fields) == share


def test_times_equal_those_of_a_loop_over_the_steps():
    random = np.random.default_rng(0)
    drawn = {phase: random.exponential(3.0, 700) for phase in PHASES}
    with view_with(lambda step: {phase: float(drawn[phase][step]) for phase in PHASES}, num_steps=700) as view:
        for phase in PHASES:
            assert view.times.totals[phase] == pytest.approx(sum(drawn[phase][SETTLED:].tolist()))
            assert view.times.usual_ms(phase) == pytest.approx(median(drawn[phase][SETTLED::2].tolist()))


@pytest.mark.parametrize("value", [nan, inf])
def test_a_phase_without_a_finite_time_counts_as_zero(value):
    with view_with(lambda step: {"checkpoint": value} if step == 20 else {}) as view:
        assert view.times.totals["checkpoint"] == 0.0
        assert view.times.total_ms == pytest.approx(9.9 * 92)

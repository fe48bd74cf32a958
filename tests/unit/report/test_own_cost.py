"""The estimate of what watching cost, from the recorded times of steps."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import pytest

from sonde.events import Event
from sonde.report.own_cost import CALLED, OBSERVING, Overhead, measure_overhead
from synthetic_steps import healthy, view_of


def overhead(own_ms, step_ms, *, every=10, end=None):
    """Of a run whose steps took `step_ms(step)` and Sonde's code `own_ms(step)`; every tenth is observed."""
    steps = [
        replace(
            step,
            scalars={
                **step.scalars,
                "step_ms": step_ms(step.number),
                "sonde_ms": own_ms(step.number),
                "observed": float(step.number % every == 0),
            },
        )
        for step in healthy(200)
    ]
    if end is not None:
        steps[-1] = replace(
            steps[-1], events=[*steps[-1].events, Event("end", 199, {"how": "finished", "exit_code": 0, "exception": ""} | end)]
        )
    with view_of(steps) as view:
        return measure_overhead([view], 0)


def test_the_work_of_every_step_counts_more_than_its_clock_shows():
    cost = overhead(lambda step: 0.1, lambda step: 1.0)
    assert cost.per_step_ms == pytest.approx(0.1 * CALLED)
    assert cost.step_ms == pytest.approx(1 - 0.1 * CALLED)
    assert cost.ratio == pytest.approx(1 / (1 - 0.1 * CALLED))
    assert cost.own_ms == pytest.approx(200 * 0.1 * CALLED)
    assert cost.observing_ms == 0


def test_observed_steps_and_the_first_ones_are_counted_apart():
    cost = overhead(lambda step: 5.0 if step == 1 else 0.6 if step % 10 == 0 else 0.1, lambda step: 10.0, end={"startup_ms": 100.0})
    assert cost.observing_ms == pytest.approx(0.5 * OBSERVING, rel=1e-5)
    assert cost.startup_ms == pytest.approx(100 + 4.9 * OBSERVING)
    assert "ms of each step and 0.5 ms more to each observed one; 100 ms to start" in str(cost)
    assert (cost.num_observed, cost.observed_share) == (20, 0.1)


def test_a_step_in_which_another_program_had_the_processor_changes_little():
    quiet = overhead(lambda step: 0.1, lambda step: 1.0)
    busy = overhead(lambda step: 30.0 if step == 101 else 0.1, lambda step: 31.0 if step == 101 else 1.0)
    assert busy.per_step_ms == pytest.approx(quiet.per_step_ms)
    assert busy.own_ms == pytest.approx(quiet.own_ms)


def test_where_every_step_is_observed_half_of_the_time_counts_as_the_work_of_every_step():
    cost = overhead(lambda step: 1.0, lambda step: 5.0, every=1)
    assert cost.per_step_ms == pytest.approx(0.5 * CALLED)
    assert cost.observing_ms == pytest.approx(0.5 * OBSERVING, rel=1e-5)
    assert cost.ratio == pytest.approx(5 / (5 - 0.5 * CALLED - 0.5 * OBSERVING))


def test_start_and_incidents_come_from_the_last_event_and_are_part_of_the_sentence():
    cost = overhead(lambda step: 0.1, lambda step: 1.0, end={"startup_ms": 310.0, "num_incidents": 2, "incidents_ms": 1250.0})
    assert (cost.startup_ms, cost.num_incidents, cost.incidents_ms) == (310.0, 2, 1250.0)
    assert str(cost) == ("Sonde added 0.17 ms to the 0.83 ms of each step; 310 ms to start; 1.2 s to search for the causes of 2 incidents")
    assert not cost.is_much


def test_nothing_is_said_of_the_start_while_the_training_runs():
    cost = overhead(lambda step: 0.1, lambda step: 1.0)
    assert isnan(cost.startup_ms)
    assert "to start" not in str(cost)


def test_the_share_of_the_training_time_is_stated_where_it_matters():
    cost = overhead(lambda step: 100.0, lambda step: 1000.0)
    assert str(cost).startswith("Sonde added 20.5 % to the training time (170 ms to the 830 ms of each step)")
    assert cost.is_much


def test_without_times_nothing_is_said():
    assert str(Overhead()) == ""
    cost = overhead(lambda step: float("nan"), lambda step: float("nan"))
    assert isnan(cost.ratio)
    assert str(cost) == ""

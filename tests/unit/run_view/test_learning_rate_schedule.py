"""The schedulers of a run, how often they step, and how the learning rates change."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest

from sonde.events import Event
from sonde.run_view.learning_rate_schedule import MAX_SERIES, LearningRate
from synthetic_steps import opening, training, view_of


def created(index=0, kind="StepLR", **given):
    about = {"class": kind, "scheduler": index, "optimizer": 0, "rates": [0.1], "initial": [0.1], "plan": {}, "parts": [], "heard": True,
             "last_epoch": 0, "source": "train.py:13", "text": "scheduler = StepLR(optimizer)"}  # fmt: skip
    return Event("scheduler", 0, about | given)


def started(index=0, step=0, **given):
    return Event("scheduler_begins", step, {"scheduler": index, "given": False, "before_optimizer": False, "last_epoch": 1} | given)


def optimizer(index):
    return Event("optimizer", 0, {"optimizer": index, "class": "SGD", "groups": [{"lr": 0.1}]})


def schedule_of(*events, num_steps=50, scalars=lambda step: {}):
    with view_of(training(num_steps, start=[*opening(), *events], scalars=scalars)) as view:
        list(view.schedule.rates)  # they are read from the log at the first access
        return view.schedule


def rate_of(*rates, losses=None):
    values = np.array(rates, np.float64)
    return LearningRate.from_columns(10 + np.arange(len(values)), values, np.ones(len(values)) if losses is None else np.array(losses))


# -- one rate --------------------------------------------------------------------------------------


def test_a_rate_is_described_by_its_ends_its_peak_and_its_changes():
    rate = rate_of(0.1, 0.4, 0.4, 0.2, 0.3)
    assert (rate.num, rate.first, rate.last, rate.peak, rate.peak_step, rate.lowest, rate.num_changes) == (5, 0.1, 0.3, 0.4, 11, 0.1, 3)
    assert (rate.tail_step, rate.tail_num) == (-1, 0)


def test_updates_without_a_known_rate_do_not_count():
    rate = rate_of(nan, 0.1, nan, 0.1)
    assert (rate.num, rate.num_changes, rate.peak_step) == (2, 0, 11)
    assert rate_of(nan, nan) is None


def test_a_rate_has_collapsed_since_it_is_below_a_thousandth_of_its_peak_for_good():
    rate = rate_of(1.0, 1e-4, 0.5, 1e-3, 1e-3, 0.0)
    assert (rate.tail_step, rate.tail_num) == (13, 3)
    assert rate_of(1.0, 1e-4, 0.5).tail_step == -1


def test_a_warm_up_from_a_small_rate_has_not_collapsed():
    assert rate_of(1e-6, 1e-3, 1.0).tail_step == -1


def test_a_rate_of_zero_from_the_start_has_no_peak_to_collapse_from():
    rate = rate_of(0.0, 0.0, 0.0)
    assert (rate.peak, rate.peak_step, rate.tail_step) == (0.0, -1, -1)


def test_the_loss_may_go_on_falling_after_the_rate_has_collapsed():
    rates = [1.0, *[1e-4] * 20]
    assert rate_of(*rates, losses=[9, *np.linspace(3, 2, 20)]).learns_in_tail
    assert not rate_of(*rates, losses=[9, *[3.0] * 20]).learns_in_tail
    assert not rate_of(*rates, losses=[9, *np.linspace(2, 3, 20)]).learns_in_tail


def test_losses_that_are_not_finite_are_left_out_of_the_tail():
    losses = [9, *np.linspace(3, 2, 20)]
    losses[1], losses[5], losses[20] = nan, inf, inf
    assert rate_of(*[1.0, *[1e-4] * 20], losses=losses).learns_in_tail


# -- the rates of a run ----------------------------------------------------------------------------


def test_rates_are_read_at_updates_only():
    def scalars(step):
        return {"lr": 0.1 if step % 2 else 7.0, "optimizer_steps": float(step % 2)}

    schedule = schedule_of(scalars=scalars)
    assert (schedule.num_updates, schedule.rates["lr"].num, schedule.rates["lr"].peak) == (25, 25, 0.1)


def test_an_update_that_a_scaler_skips_counts():
    assert schedule_of(scalars=lambda step: {"optimizer_steps": 0.0, "skipped_steps": 1.0}).num_updates == 50


def test_each_parameter_group_has_its_rate_up_to_a_limit():
    schedule = schedule_of(scalars=lambda step: {f"lr:{group}": group / 100 for group in range(2, 40)})
    assert len(schedule.rates) == MAX_SERIES
    assert schedule.rates["lr:2"].last == 0.02


# -- schedulers ------------------------------------------------------------------------------------


def test_a_scheduler_is_named_with_its_plan():
    plan = {"step_size": 30, "gamma": 0.1, "something": 5, "milestones": [30, 60]}
    (scheduler,) = schedule_of(created(plan=plan)).schedulers.values()
    assert str(scheduler) == "StepLR(step_size=30, milestones=[30, 60], gamma=0.1)"
    assert str(schedule_of(created(kind="LambdaLR")).schedulers[0]) == "LambdaLR"
    assert scheduler.evidence() == {"source": "train.py:13", "source_text": "scheduler = StepLR(optimizer)"}


def test_the_first_step_of_a_scheduler_is_known():
    first, second = schedule_of(created(0), created(1), started(1, 7, before_optimizer=True, given=True)).schedulers.values()
    assert (first.first_step, first.started) == (-1, None)
    start = second.started
    assert (start.step, start.is_before_optimizer, start.has_argument, start.last_epoch) == (second.first_step, True, True, 1)
    assert second.first_step == 7


def test_parts_of_another_scheduler_are_stepped_by_it():
    schedule = schedule_of(created(0), created(1), created(2, "SequentialLR", parts=[0, 1]), started(0), started(2))
    assert [one.created.scheduler for one in schedule.whole] == [one.created.scheduler for one in schedule.stepped] == [2]


def test_of_several_optimizers_only_the_schedulers_of_those_that_step_are_active():
    assert [one.created.scheduler for one in schedule_of(created(0), created(1, optimizer=1)).active] == [0, 1]
    assert [one.created.scheduler for one in schedule_of(optimizer(1), created(0), created(1, optimizer=1)).active] == [0]


@pytest.mark.parametrize(("steps", "is_with_every"), [(50, True), (46, True), (40, False)])
def test_a_scheduler_is_stepped_with_every_update_if_a_scaler_leaves_out_some(steps, is_with_every):
    schedule = schedule_of(created(), started(), scalars=lambda step: {"scheduler_steps": float(step < steps)})
    assert (schedule.num_steps, schedule.is_stepped_with_every_update) == (steps, is_with_every)


def test_steps_are_divided_among_the_schedulers_that_step():
    schedule = schedule_of(created(0), created(1), started(0), started(1), scalars=lambda step: {"scheduler_steps": 1.0})
    assert schedule.steps_each == 25
    assert schedule.has_step_for_every_update
    assert not schedule.is_stepped_with_every_update


@pytest.mark.parametrize(
    ("plan", "total"),
    [
        ({"total_steps": 300}, 300),
        ({"T_max": 80}, 80),
        ({"total_iters": 5}, 5),
        ({"step_size": 30}, 0),
        ({"total_steps": "many"}, 0),
    ],
)
def test_the_total_of_a_plan(plan, total):
    schedule = schedule_of(created(plan=plan))
    assert schedule.total(schedule.schedulers[0]) == total


def test_the_total_of_a_sequence_is_its_last_milestone_and_the_total_of_its_last_part():
    parts = [created(0, plan={"total_iters": 20}), created(1, plan={"T_max": 180})]
    schedule = schedule_of(*parts, created(2, parts=[0, 1], plan={"milestones": [20]}), created(3, parts=[0, 1]))
    assert schedule.total(schedule.schedulers[2]) == 200
    assert schedule.total(schedule.schedulers[3]) == 180  # chained: all at once


def test_the_end_of_the_program_is_known():
    assert not schedule_of().has_finished
    assert schedule_of(Event("end", 0, {"how": "finished", "exit_code": 0, "exception": ""})).has_finished
    assert not schedule_of(Event("end", 0, {"how": "exception", "exit_code": 1, "exception": "ValueError"})).has_finished


def test_the_line_that_steps_a_scheduler_is_known():
    line = Event("source", 0, {"call": "scheduler_step", "line": "train.py:25", "text": "scheduler.step()"})
    schedule = schedule_of(created(), line)
    assert (schedule.at(), schedule.evidence()) == (" at train.py:25", {"source": "train.py:25", "source_text": "scheduler.step()"})
    assert (schedule_of().at(), schedule_of().evidence()) == ("", {})

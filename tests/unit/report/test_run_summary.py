"""The summary of a run beside its findings: schedule, scaler, validation, who stopped it."""

from __future__ import annotations

import math

import pytest

from schedule_steps import begins, made, run
from sonde.events import Event
from sonde.report.run_summary import summarize
from synthetic_steps import opening, training, view_of


def told(steps, **logged):
    with view_of(steps) as view:
        return dict(summarize(view, {name: list(enumerate(values)) for name, values in logged.items()}))


def test_nothing_is_told_where_nothing_happened():
    assert told(training()) == {}


def test_accumulated_losses_are_said_to_be_means_of_what_backward_got():
    said = told(training(scalars=lambda step: {"backwards": 4}))
    assert said == {
        "accumulated": "4 backwards per update; the loss shown is the mean of what backward was called on, after any division by 4"
    }


@pytest.mark.parametrize(
    ("num_batches", "said"),
    [(312_500_000, "an endless sequence of batches of 32"), (1_200, "1,200 batches of 32"), (None, "batches of 32")],
)
def test_the_length_of_a_loader_is_told_unless_nobody_would_see_its_end(num_batches, said):
    about = {"call": "loader", "line": "train.py:9", "text": "", "order": "random", "batch_size": 32, "num_workers": 0}
    description = about | ({"num_batches": num_batches} if num_batches else {})
    event = Event("pass", 0, {"loader": 0, "num": 1, "num_batches": num_batches, "description": description})
    assert told(training(events={0: [event]}))["data"] == f"{said} from the DataLoader at train.py:9, shuffled, no workers"


def test_a_warm_up_its_peak_and_its_end_are_told():
    rate = lambda s: 0.1 * min((s + 1) / 50, (200 - s) / 150)  # noqa: E731 -- short
    said = told(run(scheduler=made("OneCycleLR"), rate=rate))["schedule"]
    assert said == "up from 0.002 to 0.1 at step 49, 0.000667 at the end (OneCycleLR at train.py:13, stepped with every update)"


def test_a_rate_that_is_changed_by_hand_is_told():
    assert told(training(scalars=lambda s: {"lr": 0.1 if s < 50 else 0.01}))["schedule"] == "0.1, 0.01 at the end (set by hand)"


def test_the_pace_of_a_schedule_in_epochs_is_told():
    said = told(run(scheduler=made(), every=20, first=begins(20), rate=lambda s: 0.1 * 0.5 ** (s // 20)))["schedule"]
    assert "stepped about every 20 updates" in said


def test_the_scale_of_a_grad_scaler_is_told_with_what_was_skipped_and_who_overflowed():
    overflow = Event("overflow", 0, {"where": "head.weight", "scale": 65536.0})
    steps = training(events={0: [overflow]}, scalars=lambda s: {"loss_scale": 65536.0 / (1 + (s > 0)), "skipped_steps": float(s == 0)})
    assert told(steps)["scaler"] == "scale 65536 at first, 32768 at the end, 1 of 100 updates skipped; not finite first: head.weight"


def test_a_scale_that_went_up_and_down_again_is_told_with_its_bounds():
    steps = training(scalars=lambda s: {"loss_scale": 1024.0 * (2 if 20 < s < 40 else 0.5 if 60 < s < 80 else 1)})
    assert "between 512 and 2048" in told(steps)["scaler"]


def test_how_long_it_trained_after_its_best_validation_is_told():
    said = told(training(), val_loss=[0.9, 0.5, 0.6, math.nan, 0.7])["validation"]
    assert said == "val_loss was best at step 1 (0.5), 3 evaluations before the last (0.7); 1 of 5 values are not finite"
    assert told(training(), val_loss=[0.9, 0.5, 0.4])["validation"] == "val_loss is best at its last evaluation (0.4 at step 2)"
    assert "validation" not in told(training(), loss=[0.9, 0.5, 0.6])


def test_an_early_stop_is_told_with_its_reason():
    why = "stopped: no improvement of val_loss by more than 0.001 in 5 evaluations, best 0.41 at step 900"
    steps = training(events={90: [Event("early_stopping", 90, {"stopped": True, "why": why})]})
    assert told(steps)["stopped"] == f"early, by session.early_stopping: {why.removeprefix('stopped: ')}"
    assert "stopped" not in told(training(events={90: [Event("early_stopping", 90, {"stopped": False, "why": why})]}))


def rounds(num, planned, ended="finished", ats=None):
    about = {"loader": 0, "num_batches": 10, "planned": planned, "loop": "train.py:30", "breaks": ["train.py:41"]}
    events = {10 * i: [Event("pass", 10 * i, {**about, "num": i + 1, "at": i if ats is None else ats[i]})] for i in range(num)}
    return training(10 * num, start=[*opening(), Event("end", 0, {"how": ended})], events=events)


def test_a_loop_of_epochs_that_was_left_is_told():
    assert told(rounds(4, 50))["stopped"] == "in round 4 of 50 of the loop at train.py:30, which has a break at train.py:41"


def test_a_loop_that_came_to_its_end_or_was_interrupted_was_not_left():
    assert "stopped" not in told(rounds(4, 4))
    assert "stopped" not in told(rounds(4, 50, ended="interrupted"))


def epochs_of(begun):
    """Four rounds of ten updates in which DataLoaders are made: (batches, at which update of the round, from which round on)."""
    numbers = iter(range(100))
    about = {"planned": 4, "loop": "train.py:30", "breaks": [], "num": 1}
    events = {
        10 * at + step: [
            Event("pass", 10 * at + step, {**about, "at": at, "loader": next(numbers), "num_batches": num})
            for num, when, since in begun if when == step and since <= at
        ]
        for at in range(4) for step in range(10)
    }  # fmt: skip
    steps = training(40, start=[*opening(), Event("end", 0, {"how": "finished"})], events=events)
    with view_of(steps) as view:
        return view.epochs, told(steps)


@pytest.mark.parametrize(
    "begun",
    [[(10, 0, 0)], [(10, 0, 0), (3, 9, 0)], [(3, 0, 1), (10, 0, 0)], [(10, 0, 0), (10, 0, 0)]],
    ids=["alone", "validation", "validation_first_but_not_at_first", "two_of_the_same_length"],
)
def test_a_loader_that_is_made_anew_in_each_round_is_one_that_goes_on(begun):
    """`for x, y in DataLoader(…)`, with others beside it."""
    epochs, sentences = epochs_of(begun)
    assert (epochs.num_planned, epochs.num, epochs.sure_length, epochs.num_batches[0]) == (4, 4, 10, 10)
    assert "stopped" not in sentences


def test_the_length_of_an_epoch_is_not_known_from_two_beginnings():
    events = {at: [Event("pass", at, {"loader": 0, "num": at // 10 + 1, "num_batches": 10})] for at in (0, 10)}
    with view_of(training(20, events=events)) as view:
        assert view.epochs.sure_length == 0


def test_a_loop_whose_rounds_are_not_passes_over_the_data_says_nothing():
    assert "stopped" not in told(rounds(4, 1000, ats=[0, 250, 500, 750]))

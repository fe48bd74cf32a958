"""`session.early_stopping`: when to stop, and why, in the run."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import sonde
from sonde.early_stopper import EarlyStopping
from sonde.errors import SondeError

pytestmark = pytest.mark.torch


def answers(stopping, values):
    return [stopping.step(value) for value in values]


def test_it_stops_after_so_many_evaluations_without_a_better_one():
    stopping = EarlyStopping(patience=2)
    assert answers(stopping, [1.0, 0.5, 0.6, 0.5, 0.1]) == [False, False, False, True, True]
    assert stopping.best == 0.5
    assert stopping.why == "stopped: no improvement of val_loss in 2 evaluations, best 0.5 at evaluation 1"


def test_what_is_better_by_less_than_min_delta_is_no_better():
    stopping = EarlyStopping(patience=2, min_delta=0.1)
    assert answers(stopping, [1.0, 0.95, 0.92]) == [False, False, True]
    assert "by more than 0.1" in stopping.why


def test_a_larger_accuracy_is_better():
    stopping = EarlyStopping("val_acc", patience=1)
    assert answers(stopping, [0.5, 0.6, 0.55]) == [False, False, True]
    assert (stopping.mode, stopping.best) == ("max", 0.6)


def test_a_nan_at_first_is_not_the_best_and_is_reported():
    stopping = EarlyStopping(patience=3)
    assert answers(stopping, [math.nan, 2.0, 3.0, math.nan]) == [False] * 4
    assert stopping.best == 2.0
    assert "2 of 4 values are NaN" in stopping.why


def test_nothing_but_nan_stops_too():
    stopping = EarlyStopping(patience=2)
    assert answers(stopping, [math.nan, math.nan]) == [False, True]
    assert stopping.why == "stopped: val_loss was never a number in 2 evaluations"
    assert math.isnan(stopping.best)


def test_an_infinite_loss_is_beaten_by_a_finite_one():
    stopping = EarlyStopping(patience=2)
    assert answers(stopping, [math.inf, 5.0]) == [False, False]
    assert stopping.best == 5.0


def test_a_tensor_is_a_number_too():
    stopping = EarlyStopping(patience=1)
    assert answers(stopping, [torch.tensor(1.0), torch.tensor([2.0])]) == [False, True]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"patience": 0}, "patience must be a number of evaluations, 1 or more, not 0"),
        ({"patience": 2.5}, "not 2.5"),
        ({"min_delta": -0.1}, "min_delta must be 0 or more, not -0.1"),
        ({"min_delta": math.nan}, "min_delta"),
        ({"mode": "smallest"}, "mode must be one of min, max, auto, not 'smallest'"),
        ({"monitor": "quality"}, "Its name does not show it"),
        ({"monitor": ""}, "monitor must be the name"),
        ({"monitor": 0.3}, "Pass its values to step"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused_with_a_message(wrong, message):
    with pytest.raises(SondeError, match=message):
        EarlyStopping(**wrong)


@pytest.mark.parametrize("value", ["0.3 or so", None, torch.zeros(3)], ids=["text", "none", "several"])
def test_what_is_no_number_is_refused_and_changes_nothing(value):
    stopping = EarlyStopping()
    with pytest.raises(SondeError, match="needs one number per evaluation"):
        stopping.step(value)
    assert stopping.num_evaluations == 0


def test_the_run_has_the_values_the_decisions_and_the_reason(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = iter([0.9, 0.5, 0.7, 0.6, 0.8])
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        stopping = session.early_stopping(patience=3, min_delta=0.01)
        for _epoch in range(20):
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
            if stopping.step(next(values)):
                break
    run = sonde.Run(session.run)
    assert run.scalar("val_loss")[1].tolist() == [0.9, 0.5, 0.7, 0.6, 0.8]
    evaluations = [event.data for event in run.events("early_stopping")]
    assert [one.get("better") for one in evaluations] == [None, True, True, False, False, False]
    assert [one["stopped"] for one in evaluations] == [False] * 5 + [True]
    about = dict(session.report().run.summary)
    reason = "no improvement of val_loss by more than 0.01 in 3 evaluations, best 0.5 at step 9"
    assert about["stopped"] == f"early, by session.early_stopping: {reason}"
    assert about["validation"].startswith("val_loss was best at step 9 (0.5), 3 evaluations before the last")
    assert "no improvement of val_loss" in session.report().summary()


def test_it_goes_on_deciding_where_the_session_is_closed(tmp_path):
    model = nn.Linear(3, 1)
    with sonde.watch(model, to=tmp_path / "run") as session:
        stopping = session.early_stopping(patience=1)
    assert answers(stopping, [1.0, 2.0]) == [False, True]


def test_the_switch_reports_the_early_stopping_of_the_session(tmp_path, caplog):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        session.enable_debugging(["early_stopping"])
        stopping = session.early_stopping("val_acc", patience=3)
        for value in (0.5, 0.4, 0.3):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            stopping.step(value)
    assert "watches val_acc, best 0.5, best_step 0, without_better 1, patience 3" in caplog.text

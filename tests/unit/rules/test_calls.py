"""The rules about calls: zero_grad, backward, step, and their order."""

from __future__ import annotations

import pytest

from sonde.events import Event, Severity
from sonde.rules.calls.grads_cleared_before_step import RULE as grads_cleared_before_step
from sonde.rules.calls.missing_backward import RULE as missing_backward
from sonde.rules.calls.missing_optimizer_step import RULE as missing_optimizer_step
from sonde.rules.calls.missing_zero_grad import RULE as missing_zero_grad
from sonde.rules.rule import Clear
from synthetic_steps import ask, falling, opening, stuck, the_finding, training, why_not


def test_gradients_that_are_never_cleared_are_found_with_the_line_of_the_step():
    finding = the_finding(missing_zero_grad, training(scalars=lambda s: {"stale_updates": float(s > 0), "zero_grads": 0}))
    assert finding.step == 1
    assert finding.severity == Severity.ERROR
    assert finding.evidence["source"] == "train.py:21"
    assert finding.evidence["stale_updates"] == 99


def test_gradients_that_are_never_cleared_are_critical_where_the_training_fails():
    steps = training(loss=lambda s: 2.3 * 1.2**s, scalars=lambda s: {"stale_updates": float(s > 0), "zero_grads": 0})
    assert the_finding(missing_zero_grad, steps).severity == Severity.CRITICAL


def test_one_stale_update_after_a_resume_is_no_missing_zero_grad():
    assert ask(missing_zero_grad, training(scalars=lambda s: {"stale_updates": float(s == 1)})) == Clear()


def test_accumulation_on_purpose_is_no_missing_zero_grad():
    assert ask(missing_zero_grad, training(scalars=lambda s: {"backwards": 8})) == Clear()


def test_zero_grad_cannot_be_judged_after_two_updates():
    assert "2 optimizer steps" in why_not(missing_zero_grad, training(2))


def test_an_optimizer_that_never_steps_is_found():
    steps = training(loss=stuck, scalars=lambda s: {"optimizer_steps": 0})
    finding = the_finding(missing_optimizer_step, steps)
    assert finding.severity == Severity.CRITICAL
    assert finding.evidence["source"] == "train.py:20"


@pytest.mark.parametrize("instead", ["skipped_steps", "manual_updates"])
def test_skipped_steps_and_manual_updates_are_no_missing_step(instead):
    assert ask(missing_optimizer_step, training(scalars=lambda s: {"optimizer_steps": 0, instead: 1})) == Clear()


def test_without_an_optimizer_a_missing_step_is_not_judged():
    steps = training(start=[], scalars=lambda s: {"optimizer_steps": 0})
    assert why_not(missing_optimizer_step, steps) == "no optimizer was seen"


def test_an_optimizer_of_other_models_is_not_judged_for_a_missing_step():
    start = opening(optimizers=[{"optimizer": 0, "num_owned": 0, "num_foreign": 4}])
    assert "holds" in why_not(missing_optimizer_step, training(start=start, scalars=lambda s: {"optimizer_steps": 0}))


def test_steps_without_any_gradient_and_any_backward_are_found():
    finding = the_finding(missing_backward, training(scalars=lambda s: {"backwards": 0, "empty_updates": 1}))
    assert finding.severity == Severity.CRITICAL
    assert finding.evidence["optimizer_steps"] == 100


def test_gradients_written_by_hand_are_no_missing_backward():
    assert ask(missing_backward, training(scalars=lambda s: {"backwards": 0})) == Clear()


def test_a_missing_backward_is_not_judged_after_three_steps():
    assert "only 3" in why_not(missing_backward, training(3, scalars=lambda s: {"backwards": 0, "empty_updates": 1}))


def test_gradients_cleared_between_backward_and_step_are_found_with_the_line_of_zero_grad():
    finding = the_finding(grads_cleared_before_step, training(loss=stuck, scalars=lambda s: {"cleared_updates": 1, "empty_updates": 1}))
    assert finding.evidence["source"] == "train.py:18"
    assert finding.step == 0


def test_a_batch_that_is_dropped_now_and_then_is_no_cleared_gradient():
    assert ask(grads_cleared_before_step, training(scalars=lambda s: {"cleared_updates": float(s % 5 == 0)})) == Clear()


def test_cleared_gradients_are_not_judged_without_steps():
    assert "only 0" in why_not(grads_cleared_before_step, training(scalars=lambda s: {"optimizer_steps": 0}))


@pytest.mark.parametrize("rule", [missing_zero_grad, missing_optimizer_step, missing_backward, grads_cleared_before_step])
def test_a_plain_training_is_clear(rule):
    assert ask(rule, training(loss=falling)) == Clear()


def test_the_words_of_a_hostile_source_line_stay_in_the_evidence():
    start = [*opening()[:-2], Event("source", 0, {"call": "optimizer_step", "line": "a.py:1", "text": "x\x1b[31m"})]
    steps = training(start=start, scalars=lambda s: {"stale_updates": float(s > 0)})
    assert the_finding(missing_zero_grad, steps).evidence["source_text"] == "x\x1b[31m"

"""nonfinite-parameter: weights that are NaN when the run ends, although every loss was finite."""

from __future__ import annotations

from sonde.events import Event, Severity
from sonde.rules.nonfinite.nonfinite_parameter import RULE
from sonde.rules.rule import Clear
from synthetic_steps import ask, falling, the_finding, training, why_not

BAD = Event("nonfinite", 100, {"what": "parameter", "where": "head.weight", "num_elements": 64, "num_nan": 60, "num_inf": 4})


def ended_with(*events, **given):
    return training(events={99: events}, **given)


def test_weights_that_are_nan_at_the_end_are_found():
    finding = the_finding(RULE, ended_with(BAD))
    assert (finding.severity, finding.where, finding.step) == (Severity.CRITICAL, "head.weight", 99)
    assert "64 of 64 numbers of head.weight are NaN or Inf although every loss was finite: the last update made them" in finding.cause


def test_a_gradient_of_the_last_step_that_was_not_finite_is_named():
    gradient = Event("nonfinite", 99, {"what": "gradient", "where": "net.0.weight"})
    assert "the gradient of net.0.weight was not finite in the last step" in the_finding(RULE, ended_with(gradient, BAD)).cause


def test_after_a_loss_that_was_not_finite_the_rule_is_silent():
    steps = ended_with(BAD, loss=lambda step: float("nan") if step > 80 else falling(step))
    assert ask(RULE, steps) == Clear()


def test_finite_weights_are_clear():
    assert ask(RULE, training()) == Clear()


def test_without_optimizer_steps_there_is_nothing_to_judge():
    assert why_not(RULE, [])

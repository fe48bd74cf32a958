"""Validation in training mode, and what only looks like it."""

from __future__ import annotations

from sonde.events import Event, Severity
from sonde.rules.mode.eval_in_train_mode import RULE as eval_in_train_mode
from sonde.rules.rule import Clear
from synthetic_steps import ask, opening, the_finding, training, why_not

LINE = Event("source", 0, {"call": "eval_forward", "line": "train.py:30", "text": "out = model(x)"})


def pauses(at, **given):
    """A pause with validation in training mode at each of these steps."""
    usual = {"model": "", "num_forwards": 5, "num_inputs": 4, "num_dropout": 1, "num_batch_norm": 0, "cumulative": False, "num_models": 1}
    events = {}
    for num, step in enumerate(at):
        about = usual | {"at": step, "num_pauses": num + 1, "input": float(step)} | given
        events[step] = [Event("evaluated_in_training", step, about)]
    return events


def run(at=(49, 99, 149, 199), evaluated=lambda step: step % 50 == 49, num=200, **given):
    scalars = lambda step: {"eval_forwards": float(evaluated(step))}  # noqa: E731
    return training(num, start=[*opening(), LINE], scalars=scalars, events=pauses(at, **given))


def test_validation_in_training_mode_is_a_warning_with_its_line():
    finding = the_finding(eval_in_train_mode, run())
    assert (finding.severity, finding.step, finding.evidence["source"]) == (Severity.WARNING, 49, "train.py:30")
    assert "4 times, with 1 dropout module active at train.py:30" in finding.cause


def test_the_line_that_ran_it_in_training_mode_is_named_not_the_first_that_evaluates():
    finding = the_finding(eval_in_train_mode, run(line="train.py:40", text="out = model(val_x)", num_batch_norm=2))
    assert (finding.evidence["source"], finding.evidence["source_text"]) == ("train.py:40", "out = model(val_x)")
    assert "1 dropout and 2 batch norm modules active at train.py:40" in finding.cause


def test_a_validation_set_in_one_batch_is_recognised_by_coming_again():
    assert the_finding(eval_in_train_mode, run(num_forwards=1, num_inputs=1, input=5.0)).severity == Severity.WARNING


def test_single_forwards_of_something_new_are_only_mentioned():
    assert the_finding(eval_in_train_mode, run(num_forwards=1, num_inputs=1)).severity == Severity.INFO


def test_samples_of_a_gan_from_the_same_noise_are_only_mentioned():
    assert the_finding(eval_in_train_mode, run(num_forwards=1, num_inputs=1, input=5.0, num_models=2)).severity == Severity.INFO


def test_batch_norm_alone_in_one_of_several_models_is_only_mentioned():
    assert the_finding(eval_in_train_mode, run(num_dropout=0, num_batch_norm=2, num_models=2)).severity == Severity.INFO
    assert the_finding(eval_in_train_mode, run(num_dropout=1, num_batch_norm=2, num_models=2)).severity == Severity.WARNING


def test_validation_after_every_one_of_a_few_large_updates_is_found():
    finding = the_finding(eval_in_train_mode, run(range(30), lambda step: True, 30, num_forwards=1, num_inputs=1, input=5.0))
    assert finding.severity == Severity.WARNING


def test_what_is_run_in_every_step_on_new_data_belongs_to_it():
    assert ask(eval_in_train_mode, run(range(30), lambda step: True, 30)) == Clear()


def test_monte_carlo_dropout_is_clear():
    assert ask(eval_in_train_mode, run(num_forwards=20, num_inputs=1)) == Clear()


def test_statistics_of_batch_norm_that_are_computed_anew_are_clear():
    assert ask(eval_in_train_mode, run(num_batch_norm=2, num_dropout=0, cumulative=True)) == Clear()


def test_a_model_that_does_not_care_for_its_mode_is_clear():
    assert ask(eval_in_train_mode, run(num_dropout=0)) == Clear()


def test_one_look_in_training_mode_among_validations_in_eval_mode_is_clear():
    assert ask(eval_in_train_mode, run(at=(199,))) == Clear()


def test_validation_is_not_judged_where_there_was_none():
    assert "without gradients" in why_not(eval_in_train_mode, training(scalars=lambda step: {"eval_forwards": 0.0}))
    assert "no update" in why_not(eval_in_train_mode, training(scalars=lambda step: {"optimizer_steps": 0.0}))

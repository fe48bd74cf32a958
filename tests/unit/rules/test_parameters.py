"""The rules about who owns, moves and schedules the parameters."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.events import STATISTICS, Event, Frame, Kind, Severity, Site, Step
from sonde.rules.calls.params_not_in_optimizer import RULE as params_not_in_optimizer
from sonde.rules.calls.stale_optimizer_params import RULE as stale_optimizer_params
from sonde.rules.calls.unchanged_parameter import RULE as unchanged_parameter
from sonde.rules.mode.train_in_eval_mode import RULE as train_in_eval_mode
from sonde.rules.rule import Clear
from sonde.rules.schedule.lr_zero import RULE as lr_zero
from sonde.run_view import layer_statistics_in_blocks
from synthetic_steps import (
    PARAMETER_IDS,
    ask,
    falling,
    opening,
    parameter_rows,
    row,
    stuck,
    the_finding,
    training,
    why_not,
    with_replaced_head,
)

ENCODER = [path for path in PARAMETER_IDS if path.startswith("net.")]
HEAD = ["head.weight", "head.bias"]


def updates_without(paths):
    """Update rows in which these parameters do not move, and parameter rows in which they stay."""

    def frames(step):
        return {
            Kind.UPDATE: {path: row(l2=0.0 if path in paths else 0.05) for path in PARAMETER_IDS},
            Kind.PARAMETER: {path: (row(l2=8.0) if path in paths else rows) for path, rows in parameter_rows(step).items()},
        }

    return frames


def test_an_encoder_that_no_optimizer_holds_is_found_by_its_module():
    start = opening(num_unowned=len(ENCODER), unowned=ENCODER)
    finding = the_finding(params_not_in_optimizer, training(start=start, frames=updates_without(ENCODER)))
    assert finding.where == "net"
    assert finding.severity == Severity.ERROR
    assert finding.evidence["source"] == "train.py:12"
    assert finding.evidence["num_unowned"] == 8


def test_a_network_that_only_passes_gradients_to_an_image_is_clear():
    """Style transfer: the optimizer holds the image, and the network's parameters were not frozen."""
    everything = list(PARAMETER_IDS)
    held = [{"optimizer": 0, "class": "Adam", "num_owned": 0, "num_foreign": 1, "num_foreign_with_grad": 1, "foreign": ["(3, 64, 64)"]}]
    start = opening(num_unowned=10, unowned=everything, optimizers=held)
    assert ask(params_not_in_optimizer, training(start=start, frames=updates_without(everything))) == Clear()


def with_second_model(steps, first_id):
    """The same steps, with a trained generator beside the model; its sites are numbered from `first_id` on."""
    other = {
        first_id: Site(first_id, "output", "up", "generator", "Linear", shape=(32, 64)),
        first_id + 1: Site(first_id + 1, "parameter", "up.weight", "generator", "Linear", shape=(64, 64)),
    }
    trained = []
    for step in steps:
        frames = dict(step.frames)
        if Kind.UPDATE in frames:
            update = frames[Kind.UPDATE]
            ids = np.append(update.sites, np.uint32(first_id + 1))
            values = np.concatenate([update.values, [[row(l2=0.05)[name]] for name in STATISTICS]], axis=1)
            frames[Kind.UPDATE] = Frame(Kind.UPDATE, step.number, ids, STATISTICS, values)
        trained.append(Step(step.number, 0, step.scalars, frames, step.events, {**step.sites, **other}))
    return trained


@pytest.mark.parametrize(
    ("generator_first", "loss", "severity"),
    [(True, falling, Severity.INFO), (True, stuck, Severity.WARNING), (False, falling, Severity.ERROR)],
)
def test_a_whole_model_that_nobody_trains_matters_by_its_place(generator_first, loss, severity):
    """A fixed critic runs after what is trained; an encoder that was forgotten runs before it."""
    everything = list(PARAMETER_IDS)
    steps = training(start=opening(num_unowned=10, unowned=everything), frames=updates_without(everything), loss=loss)
    finding = the_finding(params_not_in_optimizer, with_second_model(steps, 50 if generator_first else 500))
    assert finding.severity == severity


def test_unowned_parameters_without_gradients_are_clear():
    start = opening(num_unowned=len(ENCODER), unowned=ENCODER)

    def frames(step):
        gradients = {path: row(num=0, l2=0.0) if path in ENCODER else row(l2=0.2) for path in PARAMETER_IDS}
        return updates_without(ENCODER)(step) | {Kind.GRADIENT: gradients}

    assert ask(params_not_in_optimizer, training(start=start, frames=frames)) == Clear()


def test_parameters_that_are_moved_by_hand_are_clear():
    assert ask(params_not_in_optimizer, training(start=opening(num_unowned=len(ENCODER), unowned=ENCODER))) == Clear()


def test_parameters_that_are_added_to_the_optimizer_later_are_clear():
    start = opening(num_unowned=len(ENCODER), unowned=ENCODER)
    later = {40: [Event("membership", 40, {"num_unowned": 0, "unowned": [], "optimizers": []})]}
    assert ask(params_not_in_optimizer, training(start=start, events=later, frames=updates_without(ENCODER))) == Clear()


@pytest.mark.parametrize(("known_from", "first_step"), [(40, 45), (61, None)], ids=["enough steps follow", "too few follow"])
def test_gradients_count_from_the_step_on_in_which_ownership_is_known(known_from, first_step):
    ownership = {known_from: [event for event in opening(num_unowned=2, unowned=HEAD) if event.kind == "membership"]}
    start = [event for event in opening() if event.kind != "membership"]
    answer = ask(params_not_in_optimizer, training(start=start, events=ownership, frames=updates_without(HEAD)))
    assert answer == Clear() if first_step is None else [finding.step for finding in answer] == [first_step]


def test_ownership_is_not_judged_where_it_is_not_known():
    steps = training(start=[event for event in opening() if event.kind != "membership"])
    assert "which parameters the optimizers hold" in why_not(params_not_in_optimizer, steps)


def test_ownership_is_not_judged_without_gradient_statistics():
    start = opening(num_unowned=len(ENCODER), unowned=ENCODER)
    steps = training(start=start, observed=lambda step: False)
    assert why_not(params_not_in_optimizer, steps) == "no gradients were observed"
    assert why_not(stale_optimizer_params, steps) == "no gradients were observed"


def test_a_head_replaced_after_the_optimizer_was_built_is_stale_and_not_merely_missing():
    held = [{"optimizer": 0, "class": "SGD", "num_owned": 8, "num_foreign": 2, "num_foreign_with_grad": 0, "foreign": ["(10, 64)"]}]
    steps = training(start=opening(num_unowned=2, unowned=HEAD, optimizers=held), frames=updates_without(HEAD))
    finding = the_finding(stale_optimizer_params, steps)
    assert finding.where == "head"
    assert finding.evidence["num_abandoned"] == 2
    assert ask(params_not_in_optimizer, steps) == Clear()


def test_a_whole_model_replaced_is_critical():
    held = [{"optimizer": 0, "class": "SGD", "num_owned": 0, "num_foreign": 10, "num_foreign_with_grad": 0, "foreign": []}]
    everything = list(PARAMETER_IDS)
    steps = training(start=opening(num_unowned=10, unowned=everything, optimizers=held), frames=updates_without(everything), loss=stuck)
    finding = the_finding(stale_optimizer_params, steps)
    assert finding.severity == Severity.CRITICAL


def test_a_head_that_is_replaced_during_the_training_is_stale_from_then_on_and_not_from_the_start():
    finding = the_finding(stale_optimizer_params, with_replaced_head(training(200), at=80, known=90))
    assert finding.step == 76  # the old head was last seen with gradients in step 75
    assert "they replaced others after step 75, and before or in step 90" in finding.cause
    assert (finding.where, finding.severity) == ("head.weight", Severity.ERROR)
    assert finding.evidence["num_trainable"] == 10


@pytest.mark.parametrize("probe", ["discovery", "parameters_and_gradients", "on_forward_end"])
def test_ownership_is_not_judged_after_the_part_that_follows_it_was_disabled(probe):
    start = opening(num_unowned=len(ENCODER), unowned=ENCODER)
    disabled = Event("retired", 50, {"probe": probe, "where": "", "error": "RuntimeError: no shape"})
    steps = training(start=start, frames=updates_without(ENCODER), events={50: [disabled]})
    assert f"{probe} was disabled (RuntimeError: no shape)" in why_not(params_not_in_optimizer, steps)
    of_layer = Event("retired", 50, {"probe": probe, "where": "net.0", "error": "RuntimeError: no shape"})
    assert the_finding(params_not_in_optimizer, training(start=start, frames=updates_without(ENCODER), events={50: [of_layer]}))


def test_a_loose_parameter_that_gets_gradients_is_not_stale():
    held = [{"optimizer": 0, "class": "SGD", "num_owned": 10, "num_foreign": 1, "num_foreign_with_grad": 1, "foreign": ["()"]}]
    assert ask(stale_optimizer_params, training(start=opening(optimizers=held))) == Clear()


def test_a_learning_rate_of_zero_is_found():
    finding = the_finding(lr_zero, training(loss=stuck, scalars=lambda s: {"lr": 0.0}))
    assert finding.severity == Severity.CRITICAL
    assert finding.step == 0


def test_a_schedule_that_falls_to_zero_after_its_first_epoch_is_found_where_it_begins():
    finding = the_finding(lr_zero, training(loss=stuck, scalars=lambda s: {"lr": 0.1 if s < 20 else 0.0, "scheduler_steps": 1}))
    assert finding.step == 20


def test_a_schedule_that_makes_the_rate_zero_is_blamed_by_its_line():
    start = [*opening(), Event("source", 0, {"call": "scheduler_step", "line": "train.py:22", "text": "scheduler.step()"})]
    finding = the_finding(lr_zero, training(start=start, loss=stuck, scalars=lambda s: {"lr": 0.0, "scheduler_steps": 1}))
    assert finding.evidence["source"] == "train.py:22"


def test_one_group_with_a_rate_of_zero_is_a_warning():
    finding = the_finding(lr_zero, training(scalars=lambda s: {"lr:2": 0.0}))
    assert finding.severity == Severity.WARNING
    assert "group 2" in finding.cause


def test_warm_up_from_zero_is_clear():
    assert ask(lr_zero, training(scalars=lambda s: {"lr": 1e-3 * min(1, s / 10)})) == Clear()


def test_a_schedule_that_ends_at_zero_is_clear():
    assert ask(lr_zero, training(scalars=lambda s: {"lr": 1e-3 * max(0, 1 - s / 80)})) == Clear()


def test_optimizers_without_a_learning_rate_are_not_judged():
    assert "learning rate" in why_not(lr_zero, training(scalars=lambda s: {"lr": float("nan")}))


def test_training_in_eval_mode_is_found_from_the_first_validation_on():
    def scalars(step):
        return {"root_in_eval": 1, "mode_modules_in_eval": 2} if step >= 30 else {"eval_forwards": float(step == 29)}

    finding = the_finding(train_in_eval_mode, training(scalars=scalars))
    assert finding.step == 30
    assert finding.evidence["updates_in_eval"] == 70


def test_eval_mode_is_found_where_the_modules_are_counted_on_observed_steps_alone():
    def scalars(step):
        return {"root_in_eval": 1, "mode_modules": 2 * (step < 3), "mode_modules_in_eval": 2 * (step < 3)}

    assert the_finding(train_in_eval_mode, training(scalars=scalars)).step == 0


def test_frozen_batch_norm_inside_a_training_model_is_clear():
    assert ask(train_in_eval_mode, training(scalars=lambda s: {"mode_modules_in_eval": 2})) == Clear()


def test_eval_mode_without_dropout_or_batch_norm_is_clear():
    assert ask(train_in_eval_mode, training(scalars=lambda s: {"root_in_eval": 1, "mode_modules": 0})) == Clear()


def test_a_teacher_in_eval_mode_beside_its_student_is_clear():
    scalars = {"forwards": 2, "root_in_eval": 1, "mode_modules": 4, "mode_modules_in_eval": 2}
    assert ask(train_in_eval_mode, training(scalars=lambda s: scalars)) == Clear()


def test_a_parameter_that_gets_gradients_and_never_changes_is_found():
    finding = the_finding(unchanged_parameter, training(frames=updates_without(HEAD)))
    assert finding.where == "head"
    assert finding.evidence["restored"] == "no"


def test_parameters_that_are_written_back_after_each_step_are_found():
    def frames(step):
        return {Kind.PARAMETER: {path: row(l2=8.0) if path in HEAD else rows for path, rows in parameter_rows(step).items()}}

    finding = the_finding(unchanged_parameter, training(frames=frames))
    assert finding.where == "head"
    assert finding.evidence["restored"] == "yes"


@pytest.mark.parametrize(
    "excuse",
    [
        lambda s: {"lr": 0.0},
        lambda s: {"skipped_steps": 1, "optimizer_steps": 0},
        lambda s: {"optimizer_steps": 0},
        lambda s: {"empty_updates": 1},
    ],
)
def test_steps_that_cannot_change_anything_do_not_count_as_unchanged(excuse):
    assert "only 0" in why_not(unchanged_parameter, training(frames=updates_without(HEAD), scalars=excuse))


def test_gradients_too_small_to_show_are_clear():
    def frames(step):
        return updates_without(HEAD)(step) | {Kind.GRADIENT: {path: row(l2=1e-9, min=-1e-10, max=1e-10) for path in PARAMETER_IDS}}

    assert ask(unchanged_parameter, training(frames=frames)) == Clear()


def test_an_optimizer_that_acts_on_every_tenth_call_is_clear_where_the_loss_falls():
    everything = list(PARAMETER_IDS)
    steps = training(frames=updates_without(everything), observed=lambda s: s < 3)
    assert ask(unchanged_parameter, steps) == Clear()
    assert the_finding(unchanged_parameter, training(loss=stuck, frames=updates_without(everything))).severity == Severity.CRITICAL


def test_a_warm_up_so_low_that_adam_cannot_show_is_clear():
    def frames(step):
        return updates_without(HEAD)(step) | {Kind.GRADIENT: {path: row(l2=1e3, min=-500, max=500) for path in PARAMETER_IDS}}

    assert ask(unchanged_parameter, training(frames=frames, scalars=lambda s: {"lr": 1e-9})) == Clear()


def test_a_parameter_that_changes_once_is_clear():
    def frames(step):
        return {} if step == 11 else updates_without(HEAD)(step)

    assert ask(unchanged_parameter, training(frames=frames)) == Clear()


def test_parameters_without_gradients_of_their_own_are_clear():
    def frames(step):
        return updates_without(HEAD)(step) | {Kind.GRADIENT: {path: row(l2=0.2) for path in PARAMETER_IDS if path not in HEAD}}

    assert ask(unchanged_parameter, training(frames=frames)) == Clear()


def test_a_layer_that_is_added_later_is_found_from_its_first_update_on():
    def frames(step):
        kinds = updates_without(HEAD)(step) | {Kind.GRADIENT: {path: row(l2=0.2, min=-0.1, max=0.1) for path in PARAMETER_IDS}}
        return {kind: {path: each for path, each in rows.items() if path not in HEAD or step >= 8} for kind, rows in kinds.items()}

    finding = the_finding(unchanged_parameter, training(frames=frames))
    assert (finding.where, finding.step) == ("head", 8)


@pytest.mark.parametrize("rule", [unchanged_parameter, params_not_in_optimizer, stale_optimizer_params])
@pytest.mark.parametrize("paths", [HEAD, ENCODER, ()], ids=["head", "encoder", "none"])
def test_the_length_of_the_blocks_does_not_matter(rule, paths, monkeypatch):
    held = [{"optimizer": 0, "num_owned": 8, "num_foreign": 2 * (rule is stale_optimizer_params), "num_foreign_with_grad": 0}]
    unowned = list(paths) if rule is not unchanged_parameter else []
    steps = training(start=opening(num_unowned=len(unowned), unowned=unowned, optimizers=held), frames=updates_without(paths))
    in_large_blocks = ask(rule, steps)
    monkeypatch.setattr(layer_statistics_in_blocks, "MAX_BYTES", 1)
    assert ask(rule, steps) == in_large_blocks
    assert (in_large_blocks == Clear()) == (not paths)

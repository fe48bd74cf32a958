"""HookBuilder: builds immutable hooks, and refuses invalid arguments and combinations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

import sonde
from sonde import AlertSeverity, HookAction, HookBuilder, HookTrigger, SondeError
from sonde.tools.hooks import HookSpec

pytestmark = pytest.mark.torch


def test_all_settings_of_the_builder_are_in_the_hook() -> None:
    hook = (
        HookBuilder("watch attention")
        .trigger(HookTrigger.EVERY_FORWARD)
        .action(HookAction.INSPECT_TENSOR)
        .layer_patterns(["attention.*"])
        .max_executions(100)
        .build()
    )
    assert (hook.name, hook.trigger, hook.actions) == ("watch attention", HookTrigger.EVERY_FORWARD, (HookAction.INSPECT_TENSOR,))
    assert hook.max_executions == 100
    assert hook.patterns is not None
    assert hook.patterns.matches("encoder.0.attention.query")


def test_a_hook_cannot_be_changed() -> None:
    hook = HookBuilder("x").when("nan").action(HookAction.ALERT).build()
    with pytest.raises(dataclasses.FrozenInstanceError):
        hook.name = "y"  # type: ignore[misc]


def test_a_builder_can_be_used_again_after_build() -> None:
    builder = HookBuilder("x").trigger(HookTrigger.EVERY_FORWARD).action(HookAction.INSPECT_TENSOR)
    first = builder.build()
    second = builder.max_executions(3).build()
    assert (first.max_executions, second.max_executions) == (None, 3)


def test_triggers_and_actions_may_be_strings() -> None:
    hook = HookBuilder("x").trigger("on_anomaly").action("STOP_TRAINING").alert("critical").build()
    assert hook.trigger is HookTrigger.ON_ANOMALY
    assert hook.actions == (HookAction.STOP_TRAINING, HookAction.ALERT)
    assert hook.severity is AlertSeverity.CRITICAL


def test_methods_with_arguments_set_their_action_and_trigger() -> None:
    hook = HookBuilder("x").every_n_steps(10).callback(print).snapshot_to("there").alert(AlertSeverity.ERROR, "look").build()
    assert (hook.trigger, hook.every) == (HookTrigger.EVERY_N_STEPS, 10)
    assert hook.actions == (HookAction.CUSTOM_CALLBACK, HookAction.SAVE_SNAPSHOT, HookAction.ALERT)
    assert (hook.directory, hook.message) == (Path("there"), "look")
    assert HookBuilder("x").when("nan").action("alert").build().trigger is HookTrigger.ON_CONDITION


def test_a_condition_and_a_cadence_keep_another_trigger() -> None:
    hook = HookBuilder("x").trigger(HookTrigger.EVERY_BACKWARD).when("l2 > 3").every_n_steps(5).action("alert").build()
    assert (hook.trigger, hook.every, str(hook.condition)) == (HookTrigger.EVERY_BACKWARD, 5, "l2 > 3")


def begun() -> HookBuilder:
    return HookBuilder("mine")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: HookBuilder(""), "a hook needs a name"),
        (lambda: HookBuilder(3), "a hook needs a name"),
        (lambda: begun().trigger("sometimes"), "no trigger 'sometimes'.*EVERY_FORWARD, .EVERY_BACKWARD, .EVERY_N_STEPS, .ON_CONDITION"),
        (lambda: begun().trigger(HookAction.ALERT), "no trigger"),
        (lambda: begun().action(None), "no action None.*INSPECT_TENSOR"),
        (lambda: begun().alert("loud"), "no severity 'loud'.*CRITICAL"),
        (lambda: begun().alert("info", 3), "the message of an alert is a string"),
        (lambda: begun().layer_patterns([]), "list of patterns is empty"),
        (lambda: begun().layer_patterns(["re:(["]), r"regular expression '\(\[' is not valid"),
        (lambda: begun().layer_patterns([3]), "A pattern is a string"),
        (lambda: begun().max_executions(0), "max_executions of hook 'mine' must be a whole number, 1 or more"),
        (lambda: begun().max_executions(True), "whole number, 1 or more"),
        (lambda: begun().every_n_steps(-1), "every_n_steps of hook 'mine' must be a whole number, 1 or more"),
        (lambda: begun().every_n_steps(2.5), "whole number"),
        (lambda: begun().when("gradnorm > 3"), "Nearest: grad_norm"),
        (lambda: begun().callback("print"), "must be a function of one event"),
        (lambda: begun().snapshot_to(""), "needs a directory"),
        (lambda: begun().snapshot_to("x", max_mb=0), "more than 0"),
        (lambda: begun().snapshot_to("x", max_files=0), "max_files of hook 'mine'"),
        (lambda: begun().action("alert").build(), r"'mine' has no trigger.*\.trigger\("),
        (lambda: begun().trigger("every_forward").build(), r"'mine' has no action.*\.action\("),
        (lambda: begun().trigger("on_condition").action("alert").build(), r"fires on a condition, but has none.*\.when\("),
        (lambda: begun().trigger("every_n_steps").action("alert").build(), r"n is missing.*\.every_n_steps\(100\)"),
        (lambda: begun().trigger("every_forward").action("custom_callback").build(), r"but no function.*\.callback\("),
        (lambda: begun().trigger("every_forward").action("save_snapshot").build(), r"but has no directory.*\.snapshot_to\("),
        (lambda: begun().trigger("every_forward").action("track_gradients").build(), "which has none.*EVERY_BACKWARD"),
    ],
)
def test_an_invalid_hook_is_refused_with_the_call_to_write(build: Callable[[], object], message: str) -> None:
    with pytest.raises(SondeError, match=f"(?s){message}"):
        build()


@pytest.mark.parametrize(
    ("hook", "forward", "backward", "per_step"),
    [
        (begun().trigger("every_forward").action("alert"), True, False, False),
        (begun().trigger("every_backward").action("alert"), False, True, False),
        (begun().trigger("on_anomaly").action("alert"), True, True, False),
        (begun().trigger("on_anomaly").action("track_gradients"), False, True, False),
        (begun().every_n_steps(3).action("inspect_tensor"), True, False, False),
        (begun().every_n_steps(3).action("track_gradients"), False, True, False),
        (begun().every_n_steps(3).action("alert"), False, False, True),
        (begun().every_n_steps(3).action("alert").layer_patterns("a"), True, False, False),
        (begun().when("grad_norm > 10 and step > 100").action("alert"), False, False, True),
        (begun().when("grad_norm > 10 and step > 100").action("alert").layer_patterns("a"), True, True, False),
        (begun().when("nan or grad_norm > 10").action("stop_training"), True, True, False),
        (begun().when("loss > 10").action("inspect_tensor"), True, False, False),
        (begun().when("l2 > 10").action("alert"), True, False, False),
        (begun().when("backward and zero_share > 0.9").action("alert"), True, True, False),
    ],
)
def test_trigger_condition_and_actions_decide_the_passes(hook: HookBuilder, forward: bool, backward: bool, per_step: bool) -> None:
    built = hook.build()
    assert (built.runs_in(is_forward=True), built.runs_in(is_forward=False), built.is_per_step) == (forward, backward, per_step)


def test_the_public_names_exist() -> None:
    for name in ("HookBuilder", "HookTrigger", "HookAction", "AlertSeverity", "Hooks", "TrainingStopped"):
        assert getattr(sonde, name) is not None
    assert isinstance(HookBuilder("x").when("nan").action("alert").build(), HookSpec)

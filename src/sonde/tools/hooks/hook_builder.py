"""HookBuilder: builds a `HookSpec` (trigger, layers, actions and limits of a hook, immutable) from chained calls."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeVar

from sonde.condition_expressions import STEP_NAMES, Condition, parse_condition
from sonde.errors import SondeError, require_count
from sonde.events import Severity
from sonde.layer_name_patterns import LayerPatterns

AlertSeverity = Severity
"""Severity of an alert, on the same scale as findings."""


class HookTrigger(StrEnum):
    """When a hook fires."""

    EVERY_FORWARD = "every_forward"  # a selected layer has returned a tensor
    EVERY_BACKWARD = "every_backward"  # the gradient of such an output was computed
    EVERY_N_STEPS = "every_n_steps"  # in the steps 0, n, 2n …
    ON_CONDITION = "on_condition"  # the condition of `.when(…)` holds
    ON_ANOMALY = "on_anomaly"  # an output, its gradient, or the gradient of a parameter contains NaN or Inf


class HookAction(StrEnum):
    """What a hook does when it fires."""

    INSPECT_TENSOR = "inspect_tensor"  # store the statistics of the tensor
    TRACK_GRADIENTS = "track_gradients"  # store the norm of the gradient per layer and step
    SAVE_SNAPSHOT = "save_snapshot"  # write the tensor to a file
    ALERT = "alert"  # deliver an alert
    PAUSE_TRAINING = "pause_training"  # call `Hooks.on_pause` and wait
    STOP_TRAINING = "stop_training"  # raise `TrainingStopped` at the next safe point
    CUSTOM_CALLBACK = "custom_callback"  # call a function of the user


_NEED_TENSOR = frozenset({HookAction.INSPECT_TENSOR, HookAction.TRACK_GRADIENTS, HookAction.SAVE_SNAPSHOT})


@dataclass(frozen=True, slots=True)
class HookSpec:
    """Definition of a hook. It has no state, so it may be registered several times."""

    name: str
    trigger: HookTrigger
    actions: tuple[HookAction, ...]
    patterns: LayerPatterns | None = None  # None: every layer
    condition: Condition | None = None  # in addition to the trigger
    every: int = 1  # steps, in addition to the trigger
    max_executions: int | None = None
    severity: AlertSeverity = AlertSeverity.WARNING
    message: str = ""
    callback: Callable[..., Any] | None = None
    directory: Path | None = None
    max_files: int = 0
    max_bytes: int = 0

    @property
    def is_per_step(self) -> bool:
        """True if it refers to no layer: it is then evaluated once per step instead of at each layer."""
        uses_tensor = self.condition is not None and not self.condition.names <= STEP_NAMES.keys()
        by_step = self.trigger in (HookTrigger.EVERY_N_STEPS, HookTrigger.ON_CONDITION)
        return by_step and self.patterns is None and not uses_tensor and not _NEED_TENSOR & set(self.actions)

    def is_decided_by(self, names: Collection[str]) -> bool:
        """True if it refers to no layer and these values of a step, given by hand, are all that it needs."""
        return self.is_per_step and (self.condition.names if self.condition is not None else {"step"}) <= set(names)

    def runs_in(self, is_forward: bool) -> bool:
        """True if it is evaluated on outputs of layers, or on the gradients of these outputs (`is_forward` is False)."""
        only_gradients = self.trigger is HookTrigger.EVERY_BACKWARD or HookAction.TRACK_GRADIENTS in self.actions
        if self.is_per_step or is_forward:
            return not self.is_per_step and not only_gradients
        if self.trigger is HookTrigger.EVERY_FORWARD:
            return False
        uses_gradients = self.condition is not None and not self.condition.names.isdisjoint(("grad_norm", "backward"))
        return only_gradients or uses_gradients or self.trigger is HookTrigger.ON_ANOMALY

    def matches(self, layer: str, is_forward: bool) -> bool:
        return self.runs_in(is_forward) and (self.patterns is None or self.patterns.matches(layer))


MAX_FILES = 100  # default number of snapshots of one hook
MAX_MB = 64.0  # of one snapshot

Choice = TypeVar("Choice", bound=StrEnum)


class HookBuilder:
    """Builds a hook: `HookBuilder("nan").trigger(HookTrigger.ON_ANOMALY).alert(AlertSeverity.ERROR, "NaN in a layer").build()`."""

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name.strip():
            raise SondeError(f'a hook needs a name for its reports, such as HookBuilder("nan-in-attention"), not {name!r}.')
        self._name = name
        self._actions: dict[HookAction, None] = {}  # in the order of the calls
        self._fields: dict[str, Any] = {}  # other fields of the HookSpec

    def trigger(self, trigger: HookTrigger | str) -> Self:
        """Sets when the hook fires."""
        self._fields["trigger"] = parse_choice(trigger, HookTrigger, "trigger")
        return self

    def every_n_steps(self, n: int) -> Self:
        """Fires in the steps 0, n, 2n …; with another trigger, only if both apply."""
        self._fields["every"] = self._at_least_one(n, "every_n_steps")
        return self

    def when(self, condition: str) -> Self:
        """Fires if the condition is true, for instance "grad_norm > 10 and step > 100"; with a trigger, only if both apply."""
        self._fields["condition"] = parse_condition(condition)
        return self

    def max_executions(self, num: int) -> Self:
        """Ends the hook after `num` executions; it then has no cost."""
        self._fields["max_executions"] = self._at_least_one(num, "max_executions")
        return self

    def layer_patterns(self, patterns: str | Sequence[str]) -> Self:
        """Selects layers by globs ("encoder.*.attention") or regular expressions ("re:^layer\\.[0-3]\\."); by default all layers."""
        self._fields["patterns"] = LayerPatterns(patterns)
        return self

    def action(self, action: HookAction | str) -> Self:
        """Adds an action. Several actions run in the order of the calls."""
        self._actions[parse_choice(action, HookAction, "action")] = None
        return self

    def alert(self, severity: AlertSeverity | str, message: str = "") -> Self:
        """Adds an alert, delivered to the log and to the receivers of `Hooks.send_alerts_to`."""
        self._fields["severity"] = parse_choice(severity, AlertSeverity, "severity")
        if not isinstance(message, str):
            raise SondeError(f"the message of an alert is a string, not {type(message).__name__} (hook {self._name!r}).")
        self._fields["message"] = message
        return self.action(HookAction.ALERT)

    def callback(self, function: Callable[..., Any]) -> Self:
        """Adds a call of `function(event)` with a `HookEvent`: layer, step, statistics and tensor."""
        if not callable(function):
            raise SondeError(f"the callback of hook {self._name!r} must be a function of one event, not {function!r}.")
        self._fields["callback"] = function
        return self.action(HookAction.CUSTOM_CALLBACK)

    def snapshot_to(self, directory: str | Path, *, max_files: int = MAX_FILES, max_mb: float = MAX_MB) -> Self:
        """Adds a snapshot of the tensor as an .npz file in `directory`: at most `max_files` files of at most `max_mb` megabytes each."""
        if not isinstance(directory, (str, Path)) or not str(directory):
            raise SondeError(f'snapshot_to needs a directory, such as .snapshot_to("snapshots"), not {directory!r}.')
        if isinstance(max_mb, bool) or not isinstance(max_mb, (int, float)) or not max_mb > 0:
            raise SondeError(f"max_mb is the size of the largest snapshot in megabytes, more than 0, not {max_mb!r}.")
        num_files = self._at_least_one(max_files, "max_files")
        self._fields |= {"directory": Path(directory), "max_files": num_files, "max_bytes": int(max_mb * 1e6)}
        return self.action(HookAction.SAVE_SNAPSHOT)

    def build(self) -> HookSpec:
        """Returns the hook. Raises a `SondeError` that names the missing part."""
        fields, actions = self._fields, self._actions
        by_field = HookTrigger.ON_CONDITION if "condition" in fields else HookTrigger.EVERY_N_STEPS if "every" in fields else None
        trigger = fields.get("trigger", by_field)
        mistakes = (
            (trigger is None, "has no trigger", f"Add when it fires: .trigger(…) with HookTrigger.{_names(HookTrigger)}."),
            (trigger is HookTrigger.ON_CONDITION and "condition" not in fields, "fires on a condition, but has none",
             'Add one: .when("grad_norm > 10 and step > 100").'),
            (trigger is HookTrigger.EVERY_N_STEPS and "every" not in fields, "fires every n steps, but n is missing",
             "Add it: .every_n_steps(100)."),
            (not actions, "has no action", f"Add what it does: .action(…) with HookAction.{_names(HookAction)}."),
            (HookAction.CUSTOM_CALLBACK in actions and "callback" not in fields, "has the action CUSTOM_CALLBACK, but no function",
             "Add the function: .callback(lambda event: ...)."),
            (HookAction.SAVE_SNAPSHOT in actions and "directory" not in fields, "saves snapshots, but has no directory",
             'Add the directory: .snapshot_to("snapshots").'),
            (HookAction.TRACK_GRADIENTS in actions and trigger is HookTrigger.EVERY_FORWARD,
             "tracks gradients in the forward pass, which has none", "Use HookTrigger.EVERY_BACKWARD."),
        )  # fmt: skip
        for is_wrong, what, advice in mistakes:
            if is_wrong:
                raise SondeError(f"the hook {self._name!r} {what}.\n{advice}")
        return HookSpec(self._name, actions=tuple(actions), **(fields | {"trigger": trigger}))

    def _at_least_one(self, num: int, what: str) -> int:
        return require_count(num, f"{what} of hook {self._name!r}")


def parse_choice(value: object, choices: type[Choice], what: str) -> Choice:
    """The member of an enum, from the member itself or its value as a string; `what` is the noun in the error."""
    for member in choices:
        if value is member or (isinstance(value, str) and value.lower() == member.value):
            return member
    raise SondeError(f"there is no {what} {value!r}. Use one of {choices.__name__}.{_names(choices)}.")


def _names(choices: type[StrEnum]) -> str:
    return ", .".join(member.name for member in choices)

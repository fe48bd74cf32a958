"""HookBuilder: builds a `HookSpec` (trigger, layers, actions and limits of a hook, immutable) from chained calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeVar

from sonde.condition_expressions import STEP_NAMES, Condition, parse_condition
from sonde.errors import SondeError
from sonde.events import Severity
from sonde.tools.layer_name_patterns import LayerPatterns

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

    @property
    def on_forward(self) -> bool:
        """True if it is evaluated on outputs of layers."""
        return not self.is_per_step and self.trigger is not HookTrigger.EVERY_BACKWARD and not self._tracks_gradients

    @property
    def on_backward(self) -> bool:
        """True if it is evaluated on gradients of these outputs."""
        if self.is_per_step or self.trigger is HookTrigger.EVERY_FORWARD:
            return False
        if self.trigger in (HookTrigger.EVERY_BACKWARD, HookTrigger.ON_ANOMALY) or self._tracks_gradients:
            return True
        return self.condition is not None and not self.condition.names.isdisjoint(("grad_norm", "backward"))

    @property
    def _tracks_gradients(self) -> bool:
        return HookAction.TRACK_GRADIENTS in self.actions


MAX_FILES = 100  # default number of snapshots of one hook
MAX_MB = 64.0  # of one snapshot

Choice = TypeVar("Choice", bound=StrEnum)


class HookBuilder:
    """Builds a hook: `HookBuilder("nan").trigger(HookTrigger.ON_ANOMALY).alert(AlertSeverity.ERROR, "NaN in a layer").build()`."""

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name.strip():
            raise SondeError(f'a hook needs a name for its reports, such as HookBuilder("nan-in-attention"), not {name!r}.')
        self._name = name
        self._trigger: HookTrigger | None = None
        self._actions: dict[HookAction, None] = {}  # in the order of the calls
        self._patterns: LayerPatterns | None = None
        self._condition: Condition | None = None
        self._every: int | None = None
        self._max_executions: int | None = None
        self._severity, self._message = AlertSeverity.WARNING, ""
        self._callback: Callable[..., Any] | None = None
        self._directory: Path | None = None
        self._max_files, self._max_mb = MAX_FILES, MAX_MB

    def trigger(self, trigger: HookTrigger | str) -> Self:
        """Sets when the hook fires."""
        self._trigger = parse_choice(trigger, HookTrigger, "trigger")
        return self

    def every_n_steps(self, n: int) -> Self:
        """Fires in the steps 0, n, 2n …; with another trigger, only if both apply."""
        self._every = self._at_least_one(n, "every_n_steps")
        return self

    def when(self, condition: str) -> Self:
        """Fires if the condition is true, for instance "grad_norm > 10 and step > 100"; with a trigger, only if both apply."""
        self._condition = parse_condition(condition)
        return self

    def max_executions(self, num: int) -> Self:
        """Ends the hook after `num` executions; it then has no cost."""
        self._max_executions = self._at_least_one(num, "max_executions")
        return self

    def layer_patterns(self, patterns: str | Sequence[str]) -> Self:
        """Selects layers by globs ("encoder.*.attention") or regular expressions ("re:^layer\\.[0-3]\\."); by default all layers."""
        self._patterns = LayerPatterns(patterns)
        return self

    def action(self, action: HookAction | str) -> Self:
        """Adds an action. Several actions run in the order of the calls."""
        self._actions[parse_choice(action, HookAction, "action")] = None
        return self

    def alert(self, severity: AlertSeverity | str, message: str = "") -> Self:
        """Adds an alert, delivered to the log and to the receivers of `Hooks.send_alerts_to`."""
        self._severity = parse_choice(severity, AlertSeverity, "severity")
        if not isinstance(message, str):
            raise SondeError(f"the message of an alert is a string, not {type(message).__name__} (hook {self._name!r}).")
        self._message = message
        return self.action(HookAction.ALERT)

    def callback(self, function: Callable[..., Any]) -> Self:
        """Adds a call of `function(event)` with a `HookEvent`: layer, step, statistics and tensor."""
        if not callable(function):
            raise SondeError(f"the callback of hook {self._name!r} must be a function of one event, not {function!r}.")
        self._callback = function
        return self.action(HookAction.CUSTOM_CALLBACK)

    def snapshot_to(self, directory: str | Path, *, max_files: int = MAX_FILES, max_mb: float = MAX_MB) -> Self:
        """Adds a snapshot of the tensor as an .npz file in `directory`: at most `max_files` files of at most `max_mb` megabytes each."""
        if not isinstance(directory, (str, Path)) or not str(directory):
            raise SondeError(f'snapshot_to needs a directory, such as .snapshot_to("snapshots"), not {directory!r}.')
        if isinstance(max_mb, bool) or not isinstance(max_mb, (int, float)) or not max_mb > 0:
            raise SondeError(f"max_mb is the size of the largest snapshot in megabytes, more than 0, not {max_mb!r}.")
        self._directory = Path(directory)
        self._max_files, self._max_mb = self._at_least_one(max_files, "max_files"), float(max_mb)
        return self.action(HookAction.SAVE_SNAPSHOT)

    def build(self) -> HookSpec:
        """Returns the hook. Raises a `SondeError` that names the missing part."""
        trigger = self._trigger
        if trigger is None:
            if self._condition is None and self._every is None:
                raise self._incomplete("has no trigger", f"Add when it fires: .trigger(…) with HookTrigger.{_names(HookTrigger)}.")
            trigger = HookTrigger.ON_CONDITION if self._condition is not None else HookTrigger.EVERY_N_STEPS
        if trigger is HookTrigger.ON_CONDITION and self._condition is None:
            raise self._incomplete("fires on a condition, but has none", 'Add one: .when("grad_norm > 10 and step > 100").')
        if trigger is HookTrigger.EVERY_N_STEPS and self._every is None:
            raise self._incomplete("fires every n steps, but n is missing", "Add it: .every_n_steps(100).")
        if not self._actions:
            raise self._incomplete("has no action", f"Add what it does: .action(…) with HookAction.{_names(HookAction)}.")
        if HookAction.CUSTOM_CALLBACK in self._actions and self._callback is None:
            raise self._incomplete("has the action CUSTOM_CALLBACK, but no function", "Add the function: .callback(lambda event: ...).")
        if HookAction.SAVE_SNAPSHOT in self._actions and self._directory is None:
            raise self._incomplete("saves snapshots, but has no directory", 'Add the directory: .snapshot_to("snapshots").')
        if HookAction.TRACK_GRADIENTS in self._actions and trigger is HookTrigger.EVERY_FORWARD:
            raise self._incomplete("tracks gradients in the forward pass, which has none", "Use HookTrigger.EVERY_BACKWARD.")
        return HookSpec(
            name=self._name, trigger=trigger, actions=tuple(self._actions), patterns=self._patterns, condition=self._condition,
            every=self._every or 1, max_executions=self._max_executions, severity=self._severity, message=self._message,
            callback=self._callback, directory=self._directory, max_files=self._max_files, max_bytes=int(self._max_mb * 1e6),
        )  # fmt: skip

    def _incomplete(self, what: str, advice: str) -> SondeError:
        return SondeError(f"the hook {self._name!r} {what}.\n{advice}")

    def _at_least_one(self, num: int, what: str) -> int:
        if isinstance(num, bool) or not isinstance(num, int) or num < 1:
            raise SondeError(f"{what} of hook {self._name!r} is a whole number, 1 or more, such as .{what}(100), not {num!r}.")
        return num


def parse_choice(value: object, choices: type[Choice], what: str) -> Choice:
    """The member of an enum, from the member itself or its value as a string; `what` is the noun in the error."""
    for member in choices:
        if value is member or (isinstance(value, str) and value.lower() == member.value):
            return member
    raise SondeError(f"there is no {what} {value!r}. Use one of {choices.__name__}.{_names(choices)}.")


def _names(choices: type[StrEnum]) -> str:
    return ", .".join(member.name for member in choices)

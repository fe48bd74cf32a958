"""HookBuilder: builds a `HookSpec` from chained calls. Each call checks its argument; `build()` checks the combination."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeVar

from sonde.condition_expressions import Condition, parse_condition
from sonde.errors import SondeError
from sonde.tools.hooks.hook_spec import AlertSeverity, HookAction, HookSpec, HookTrigger
from sonde.tools.layer_name_patterns import LayerPatterns

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

    # -- trigger -----------------------------------------------------------------------------------

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

    # -- layers ------------------------------------------------------------------------------------

    def layer_patterns(self, patterns: str | Sequence[str]) -> Self:
        """Selects layers by globs ("encoder.*.attention") or regular expressions ("re:^layer\\.[0-3]\\."); by default all layers."""
        self._patterns = LayerPatterns(patterns)
        return self

    # -- actions -----------------------------------------------------------------------------------

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

    # -- build -------------------------------------------------------------------------------------

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
            name=self._name,
            trigger=trigger,
            actions=tuple(self._actions),
            patterns=self._patterns,
            condition=self._condition,
            every=self._every or 1,
            max_executions=self._max_executions,
            severity=self._severity,
            message=self._message,
            callback=self._callback,
            directory=self._directory,
            max_files=self._max_files,
            max_bytes=int(self._max_mb * 1e6),
        )

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

"""What hooks do, and the bounded things that they do it with."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sonde.capture.error_isolation import MAX_FAILURES
from sonde.tools.hooks.alerts import Alert, Alerts, in_words
from sonde.tools.hooks.hook import Hook, HookAction, HookTrigger
from sonde.tools.hooks.hook_events import HookEvent, TrainingStopped
from sonde.tools.hooks.tensor_snapshots import save_snapshot
from sonde.views.numbers import counted

MAX_NORMS = 1000  # gradients that are remembered per layer
MAX_LAYERS = 10_000  # whose gradients are remembered

_log = logging.getLogger("sonde")


@dataclass(frozen=True, slots=True)
class HookStatus:
    """How a registered hook is doing."""

    id: str
    name: str
    state: str  # active | done (max_executions) | retired (it kept failing)
    executions: int
    layers: tuple[str, ...]  # on which it stands while attached
    faults: int
    last_error: str
    unknown: tuple[str, ...]  # names of its condition that had no value whenever it was asked

    def __str__(self) -> str:
        notes = [f"fired {counted(self.executions, 'time')}"]
        if self.layers:
            notes.append(f"on {counted(len(self.layers), 'layer')}")
        if self.unknown:
            notes.append(f"its condition could not be decided: no value for {', '.join(self.unknown)}")
        if self.last_error:
            notes.append(f"{counted(self.faults, 'failure')}, the last: {self.last_error}" if self.faults else self.last_error)
        return f"{self.id}: {self.state}, {'; '.join(notes)}"


@dataclass(slots=True)
class Registered:
    """A hook at work: what it has done so far."""

    id: str
    hook: Hook
    layers: tuple[str, ...] = ()  # on which it stands
    executions: int = 0
    faults: int = 0
    last_error: str = ""
    num_files: int = 0
    num_decided: int = 0
    unknown: frozenset[str] = frozenset()  # names without a value when its condition could not be decided
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def state(self) -> str:
        if self.faults >= MAX_FAILURES:
            return "retired"
        limit = self.hook.max_executions
        return "done" if limit is not None and self.executions >= limit else "active"

    @property
    def status(self) -> HookStatus:
        unknown = () if self.num_decided else tuple(sorted(self.unknown))
        return HookStatus(
            self.id, self.hook.name, self.state, self.executions, self.layers, self.faults, self.last_error, unknown
        )

    def is_due(self, step: int) -> bool:
        return step % self.hook.every == 0 and self.state == "active"

    def holds(self, event: HookEvent) -> bool:
        """Whether the trigger and the condition agree. Where that cannot be told, it does not fire, and `status` says so."""
        if self.hook.trigger is HookTrigger.ON_ANOMALY and not event.is_anomaly:
            return False
        condition = self.hook.condition
        if condition is None:
            return True
        answer = event.decide(condition)
        if answer is None:
            self.unknown = condition.names - event.values.keys()
            return False
        self.num_decided += 1
        return answer

    def claim(self) -> bool:
        """One execution of those that are left; threads share them."""
        with self._lock:
            if self.state != "active":
                return False
            self.executions += 1
            return True

    def failed(self, error: Exception, event: HookEvent) -> None:
        with self._lock:
            self.faults += 1
            self.last_error = f"{type(error).__name__}: {error}"[:500]
            is_first = self.faults == 1
        if is_first:
            place = f" at {event.layer}" if event.layer else ""
            _log.warning(
                "sonde: the hook %r failed%s in step %d (%s). Training goes on; after %d failures the hook is taken out.",
                self.hook.name, place, event.step, self.last_error, MAX_FAILURES,
            )  # fmt: skip


class Desk:
    """What actions work with: alerts, gradient norms, the way to a person, and a request to stop."""

    def __init__(self) -> None:
        self.alerts = Alerts()
        self.gradients: dict[str, deque[tuple[int, float]]] = {}
        self.on_pause: Callable[[HookEvent], object] | None = None
        self.stop: TrainingStopped | None = None  # asked for, and not raised yet
        self._said_no_console = False

    def perform(self, action: HookAction, registered: Registered, event: HookEvent) -> Any:
        """Do it. What it returns becomes the `value` of the result."""
        hook = registered.hook
        match action:
            case HookAction.INSPECT_TENSOR:
                return event.stats
            case HookAction.TRACK_GRADIENTS:
                return self._track(event)
            case HookAction.SAVE_SNAPSHOT:
                return self._save(registered, event)
            case HookAction.ALERT:
                alert = Alert(hook.severity, _reason(hook, event), hook.name, event.layer, event.step, _evidence(hook, event))
                return self.alerts.give(alert)
            case HookAction.PAUSE_TRAINING:
                return self._pause(hook, event)
            case HookAction.STOP_TRAINING:
                return self.ask_to_stop(_told(hook, event), hook, event)
            case HookAction.CUSTOM_CALLBACK:
                assert hook.callback is not None  # by the builder
                return hook.callback(event)

    def ask_to_stop(self, reason: str, hook: Hook, event: HookEvent) -> str:
        """Whoever asks first is named."""
        if self.stop is None:
            place = f" at {event.layer}" if event.layer else ""
            message = f"the hook {hook.name!r} stopped the training in step {event.step}{place}: {reason}."
            self.stop = TrainingStopped(message, hook=hook.name, layer=event.layer, step=event.step)
        return reason

    def _track(self, event: HookEvent) -> float:
        norms = self.gradients.get(event.layer)
        if norms is None and len(self.gradients) < MAX_LAYERS:
            norms = self.gradients.setdefault(event.layer, deque(maxlen=MAX_NORMS))
        if norms is not None:
            norms.append((event.step, event.grad_norm))
        return event.grad_norm

    def _save(self, registered: Registered, event: HookEvent) -> Any:
        hook = registered.hook
        assert hook.directory is not None  # by the builder
        if registered.num_files >= hook.max_files:
            return f"{hook.max_files} snapshots are kept already: see max_files of snapshot_to"
        saved = save_snapshot(event, hook.directory, hook.name, hook.max_bytes)
        if isinstance(saved, str):
            if not registered.last_error:
                _log.warning("sonde: the hook %r saved no snapshot of %s: %s.", hook.name, event.layer, saved)
            registered.last_error = saved
        else:
            registered.num_files += 1
        return saved

    def _pause(self, hook: Hook, event: HookEvent) -> Any:
        if self.on_pause is not None:
            return self.on_pause(event)
        if not self._said_no_console:
            self._said_no_console = True
            _log.warning(
                "sonde: the hook %r would pause at %s in step %d (%s), but there is no console here. Training goes on. "
                "To be called instead, set hooks.on_pause to a function of one event.",
                hook.name, event.layer or "the end of the step", event.step, _told(hook, event),
            )  # fmt: skip
        return None


def kept(value: Any) -> Any:
    """A result as it may be remembered: numbers, texts and Sonde's own values; of anything else its kind, so that no tensor stays alive."""
    if value is None or isinstance(value, (bool, int, float, str)) or type(value).__module__.startswith(("sonde.", "pathlib")):
        return value
    if isinstance(value, torch.Tensor):
        return f"Tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def _reason(hook: Hook, event: HookEvent) -> str:
    """Why it fired, in the user's words where there are some."""
    if hook.message:
        return hook.message
    if hook.trigger is HookTrigger.ON_ANOMALY:
        return f"NaN or Inf in the {'output' if event.is_forward else 'gradient'}"
    return str(hook.condition) if hook.condition is not None else hook.name


def _evidence(hook: Hook, event: HookEvent) -> dict[str, float | str]:
    names = set(hook.condition.names) if hook.condition is not None else set()
    if hook.trigger is HookTrigger.ON_ANOMALY:
        names |= {"nan", "inf", "num"}
    if "finite" in names:
        names |= {"nan", "inf"}
    names -= {"step", "forward", "backward", "finite"}  # said anyway
    return {name: event.values[name] for name in sorted(names) if name in event.values}


def _told(hook: Hook, event: HookEvent) -> str:
    numbers = in_words(_evidence(hook, event))
    return f"{_reason(hook, event)} ({numbers})" if numbers else _reason(hook, event)

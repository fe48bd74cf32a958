"""Registered hooks with their counters, and the actions that they run: alerts, snapshots of tensors, pause, stop, callbacks."""

import io
import itertools
import json
import logging
import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sonde.capture.disable_failing_probes import MAX_FAILURES
from sonde.condition_expressions import STEP_NAMES
from sonde.formatting import counted, listing, strict
from sonde.render.safe_write import write_new
from sonde.statistics.statistics_without_extension import Unsupported, readable
from sonde.tools.hooks.alerts import Alert, AlertDispatcher, format_evidence
from sonde.tools.hooks.hook_builder import HookAction, HookSpec, HookTrigger
from sonde.tools.hooks.hook_events import HookEvent, TrainingStopped

_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME = 80  # characters of a layer's name in a file's name
_NUMPY_TYPES = "float16 float32 float64 complex64 complex128 bool int8 int16 int32 int64 uint8 uint16 uint32 uint64"
_IN_NUMPY = frozenset(getattr(torch, name) for name in _NUMPY_TYPES.split())


def save_snapshot(event: HookEvent, directory: Path, hook: str, max_bytes: int) -> Path | str:
    """Writes the event's tensor. Returns the path, or the reason why nothing was written."""
    if event.tensor is None:
        return "there is no tensor to save"
    try:
        tensor = readable(event.tensor)
    except Unsupported as error:
        return str(error)
    width = tensor.element_size() if tensor.dtype in _IN_NUMPY else 4
    if tensor.numel() * width > max_bytes:
        return f"it has {tensor.numel() * width / 1e6:.3g} MB, more than the limit of {max_bytes / 1e6:.3g} MB: see max_mb of snapshot_to"
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    # numpy has no bfloat16 and no eight-bit floats; float32 represents them exactly.
    plain = tensor.to("cpu", tensor.dtype if tensor.dtype in _IN_NUMPY else torch.float32).resolve_conj().resolve_neg()
    about = {
        "hook": hook, "layer": event.layer, "item": event.item, "step": event.step, "pass": "forward" if event.is_forward else "backward",
        "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(event.shape), "metadata": event.metadata,
    }  # fmt: skip
    file = io.BytesIO()
    np.savez(file, values=plain.numpy().reshape(event.shape), about=np.array(json.dumps(strict(about), allow_nan=False)))
    stem = f"{_file_name_part(hook)}_{_file_name_part(event.layer)}_step{event.step:06d}_{about['pass']}"
    names = itertools.chain([stem], (f"{stem}-{again}" for again in itertools.count(2)))  # earlier snapshots stay
    path = next(path for name in names if not (path := directory / f"{name}.npz").exists())
    write_new(path, file.getvalue())
    return path


def _file_name_part(name: str) -> str:
    return _UNSAFE_CHARACTERS.sub("-", name)[-_MAX_NAME:].lstrip(".") or "model"


MAX_NORMS = 1000  # stored gradient norms per layer
MAX_LAYERS = 10_000  # layers with stored gradient norms

_log = logging.getLogger("sonde")


@dataclass(frozen=True, slots=True)
class HookStatus:
    """State and counters of a registered hook."""

    id: str
    name: str
    state: str  # active | done (max_executions reached) | retired (too many failures)
    executions: int
    layers: tuple[str, ...]  # layers that it is attached to
    faults: int
    last_error: str
    unknown: tuple[str, ...]  # names in its condition that never had a value
    unmatched: str = ""  # a sentence, if its patterns matched no layer so far

    def __str__(self) -> str:
        notes = [f"fired {counted(self.executions, 'time')}"]
        if self.layers:
            notes.append(f"on {counted(len(self.layers), 'layer')}")
        if self.unmatched:
            notes.append(self.unmatched)
        if self.unknown:
            missing = f"its condition could not be decided: no value for {', '.join(self.unknown)}"
            loggable = ", ".join(f"{name}=…" for name in self.unknown if name in STEP_NAMES)
            notes.append(f"{missing} (pass it before the optimizer step: hooks.log({loggable}))" if loggable else missing)
        if self.last_error:
            notes.append(f"{counted(self.faults, 'failure')}, the last: {self.last_error}" if self.faults else self.last_error)
        return f"{self.id}: {self.state}, {'; '.join(notes)}"


@dataclass(slots=True)
class RegisteredHook:
    """A hook with its id and counters."""

    id: str
    hook: HookSpec
    layers: tuple[str, ...] = ()  # layers that it is attached to
    executions: int = 0
    faults: int = 0
    last_error: str = ""
    num_files: int = 0
    num_decided: int = 0
    matches_no_layer: bool = False  # of the model that it is attached to
    has_matched: bool = False  # a layer that `execute_hooks` was called with
    unmatched: str = ""  # the first one that its patterns did not match
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
        is_unmatched = not self.has_matched and not self.layers and (self.unmatched or self.matches_no_layer)
        unmatched = self._describe_unmatched() if is_unmatched else ""
        return HookStatus(
            self.id, self.hook.name, self.state, self.executions, self.layers, self.faults, self.last_error, unknown, unmatched
        )

    def matches(self, layer: str, is_forward: bool) -> bool:
        """True if it runs on this layer. The first layer that its patterns do not match is logged, unless they have matched another."""
        patterns = self.hook.patterns
        if patterns is not None and not self.has_matched:
            self.has_matched = patterns.matches(layer)
            if not self.has_matched and not self.unmatched:
                self.unmatched = layer
                if not self.layers:
                    _log.warning("sonde: the hook %r did not run: %s.", self.hook.name, self._describe_unmatched())
        return self.hook.matches(layer, is_forward)

    def _describe_unmatched(self) -> str:
        patterns = self.hook.patterns.patterns if self.hook.patterns is not None else ()
        names = listing(list(map(repr, patterns)))
        if not self.unmatched:
            return f"no layer of the model matches {names}"
        return f"no layer so far matches {names}; the first was {self.unmatched!r}"

    def is_due(self, step: int) -> bool:
        return step % self.hook.every == 0 and self.state == "active"

    def applies_to(self, event: HookEvent) -> bool:
        """True if the trigger and the condition apply. An undecidable condition counts as false and appears in `status`."""
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
        """Counts one execution. Returns False if none is left; threads share the counter."""
        with self._lock:
            if self.state != "active":
                return False
            self.executions += 1
            return True

    def record_failure(self, error: Exception, event: HookEvent) -> None:
        with self._lock:
            self.faults += 1
            self.last_error = f"{type(error).__name__}: {error}"[:500]
            is_first = self.faults == 1
        if is_first:
            what = f"{self.hook.name!r} failed{f' at {event.layer}' if event.layer else ''} in step {event.step} ({self.last_error})"
            _log.warning("sonde: the hook %s. Training continues; after %d failures the hook is disabled.", what, MAX_FAILURES)


class ActionContext:
    """Runs actions and holds their state: alerts, gradient norms, the pause callback and a request to stop."""

    def __init__(self) -> None:
        self.alerts = AlertDispatcher()
        self.gradients: dict[str, deque[tuple[int, float]]] = {}
        self.on_pause: Callable[[HookEvent], object] | None = None
        self.stop: TrainingStopped | None = None  # requested, not raised yet
        self._has_warned_no_console = False

    def run_action(self, action: HookAction, registered: RegisteredHook, event: HookEvent) -> Any:
        """Runs one action. The return value becomes `HookResult.value`."""
        hook = registered.hook
        match action:
            case HookAction.INSPECT_TENSOR:
                return event.stats
            case HookAction.TRACK_GRADIENTS:
                if event.layer in self.gradients or len(self.gradients) < MAX_LAYERS:
                    self.gradients.setdefault(event.layer, deque(maxlen=MAX_NORMS)).append((event.step, event.grad_norm))
                return event.grad_norm
            case HookAction.SAVE_SNAPSHOT:
                return self._save(registered, event)
            case HookAction.ALERT:
                alert = Alert(hook.severity, _reason(hook, event), hook.name, event.layer, event.step, _evidence(hook, event))
                return self.alerts.emit(alert)
            case HookAction.PAUSE_TRAINING:
                return self._pause(hook, event)
            case HookAction.STOP_TRAINING:
                return self.request_stop(_reason_with_evidence(hook, event), hook, event)
            case HookAction.CUSTOM_CALLBACK:
                assert hook.callback is not None  # checked by HookBuilder
                return hook.callback(event)

    def request_stop(self, reason: str, hook: HookSpec, event: HookEvent) -> str:
        """Requests `TrainingStopped` at the next safe point; the first request is the one that is raised."""
        if self.stop is None:
            place = f" at {event.layer}" if event.layer else ""
            message = f"the hook {hook.name!r} stopped the training in step {event.step}{place}: {reason}."
            self.stop = TrainingStopped(message, hook=hook.name, layer=event.layer, step=event.step)
        return reason

    def _save(self, registered: RegisteredHook, event: HookEvent) -> Any:
        hook = registered.hook
        assert hook.directory is not None  # checked by HookBuilder
        if registered.num_files >= hook.max_files:
            return f"{hook.max_files} snapshots were written already: see max_files of snapshot_to"
        saved = save_snapshot(event, hook.directory, hook.name, hook.max_bytes)
        if isinstance(saved, str):
            if not registered.last_error:
                _log.warning("sonde: the hook %r saved no snapshot of %s: %s.", hook.name, event.layer, saved)
            registered.last_error = saved
        else:
            registered.num_files += 1
        return saved

    def _pause(self, hook: HookSpec, event: HookEvent) -> Any:
        if self.on_pause is not None:
            return self.on_pause(event)
        if not self._has_warned_no_console:
            self._has_warned_no_console = True
            where = f"{event.layer or 'the end of the step'} in step {event.step} ({_reason_with_evidence(hook, event)})"
            advice = "Training continues. To handle pauses, set hooks.on_pause to a function of one event."
            _log.warning("sonde: the hook %r would pause at %s, but there is no console. %s", hook.name, where, advice)
        return None


def stored_value(value: Any) -> Any:
    """The value for the history: numbers, strings and Sonde's own types; a description of others, so that no tensor stays alive."""
    if value is None or isinstance(value, (bool, int, float, str)) or type(value).__module__.startswith(("sonde.", "pathlib")):
        return value
    return f"Tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _reason(hook: HookSpec, event: HookEvent) -> str:
    if hook.message:
        return hook.message
    if hook.trigger is HookTrigger.ON_ANOMALY:
        return f"NaN or Inf in the {'output' if event.is_forward else 'gradient'}"
    return str(hook.condition) if hook.condition is not None else hook.name


def _evidence(hook: HookSpec, event: HookEvent) -> dict[str, float | str]:
    names = set(hook.condition.names) if hook.condition is not None else set()
    names |= {"nan", "inf", "num"} if hook.trigger is HookTrigger.ON_ANOMALY else {"nan", "inf"} if "finite" in names else set()
    names -= {"step", "forward", "backward", "finite"}  # already part of the message
    return {name: event.values[name] for name in sorted(names) if name in event.values}


def _reason_with_evidence(hook: HookSpec, event: HookEvent) -> str:
    numbers = format_evidence(_evidence(hook, event))
    return f"{_reason(hook, event)} ({numbers})" if numbers else _reason(hook, event)

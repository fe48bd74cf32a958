"""HookSpec: trigger, layers, actions and limits of a hook, as an immutable value. `HookBuilder` creates and checks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sonde.condition_expressions import STEP_NAMES, Condition
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

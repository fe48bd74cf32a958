"""What a probe is: it measures one aspect of a training through the callbacks of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from sonde.capture.current_step_state import CurrentStep
from sonde.capture.training_callbacks import TrainingCallbacks
from sonde.statistics.tensor_statistics_table import StatisticsTable

if TYPE_CHECKING:
    from sonde.capture.disable_failing_probes import ErrorIsolation
    from sonde.capture.incident_types import Incident
    from sonde.capture.run_log_recorder import StepRecorder
    from sonde.capture.step_inputs_for_replay import ReplayBuffer
    from sonde.capture.step_phase_timer import PhaseTimer
    from sonde.capture.user_source_line import CallSites
    from sonde.capture.watched_models_registry import ModelRegistry
    from sonde.capture.zero_grad_tracking import GradientState
    from sonde.config import DebugConfig, MeasuredParts
    from sonde.statistics.batched_device_reads import DeferredReads


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """What probes work with."""

    config: DebugConfig
    measured: MeasuredParts
    recorder: StepRecorder
    models: ModelRegistry
    state: CurrentStep
    timer: PhaseTimer
    isolation: ErrorIsolation
    call_sites: CallSites
    gradients: GradientState
    deferred: DeferredReads
    buffer: ReplayBuffer
    concerns: Callable[[torch.optim.Optimizer], bool]  # whether an optimizer is part of the watched training


class Probe(TrainingCallbacks):
    """Measures one aspect. A probe overrides the callbacks that it needs; the tracker calls no other. A probe is called at every step, or
    with `OBSERVED_ONLY` at observed steps. Callbacks may return an `Incident`, which is handled at once. An error in a probe is isolated; a
    probe that keeps failing is disabled. `on_forward_start` and `on_forward_end` are called for the outermost forward of a watched model
    with gradients on; forwards in evaluation have callbacks of their own."""

    name: ClassVar[str]
    OBSERVED_ONLY: ClassVar[bool] = False  # no callback is called in other steps
    OBSERVED_CALLBACKS: ClassVar[frozenset[str]] = frozenset({"tables", "collect"})  # these are called in observed steps only

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._state = context.state
        self._recorder = context.recorder

    @property
    def is_enabled(self) -> bool:
        """Whether the settings ask for it; otherwise it is never called."""
        return True

    def on_step_start(self) -> None:
        """An observed step begins."""

    def on_eval_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A watched model is called without gradients, or in eval mode."""

    def on_eval_forward_end(self, module: nn.Module, output: Any) -> Incident | None:
        """A forward of a watched model is over, whatever its mode."""

    def on_update_skipped(self, optimizer: torch.optim.Optimizer) -> Incident | None:
        """A GradScaler held the optimizer back."""

    def on_incident(self, incident: Incident, is_confirmed: bool) -> None:
        """An incident was handled; not confirmed: it turned out to be none."""

    def tables(self) -> Iterable[StatisticsTable]:
        """At the end of an observed step: what was measured, in case some of it is still on a device and has to be fetched."""
        return ()

    def collect(self) -> Incident | None:
        """At the end of an observed step: write frames and scalars."""

    def on_step_end(self) -> Incident | None:
        """At the end of every step, before its record is written."""

    def on_step_timed(self, training_ns: int) -> None:
        """After `on_step_end`: the times of the step are in its scalars; `training_ns` is what it took without Sonde."""

    def reset(self) -> None:
        """After an observed step: forget it, whatever became of it."""

    def on_detach(self) -> None:
        """Watching pauses or ends: remove everything from torch."""

"""Modes and levels, and the parts of a training that each of them measures: the table of docs/guide/configuration.md.

A mode chooses aspects of a training, a level their detail. The single settings (`enable_…`, `log_…`) switch parts off; none adds a part
that the mode does not include.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sonde.config.settings import DebugConfig


class DebugMode(StrEnum):
    """Which aspects of a training are measured."""

    NONE = "none"  # measures nothing: a run with a start and an end
    ANOMALY_DETECTION = "anomaly_detection"  # non-finite values and spikes, and their origin
    GRADIENT_CHECKING = "gradient_checking"  # gradients of parameters and of layer outputs
    MEMORY_PROFILING = "memory_profiling"  # memory of the process and of tensors, and its owners
    PERFORMANCE_PROFILING = "performance_profiling"  # steps line by line and layer by layer
    FULL_DEBUG = "full_debug"  # all of it


class DebugLevel(StrEnum):
    """The detail of the measurements. Each level includes those before it."""

    BASIC = "basic"  # per parameter and per process; no layers, no lines
    INTERMEDIATE = "intermediate"  # layers, weights and updates, lines
    ADVANCED = "advanced"  # histograms and batches on every observed step
    EXPERT = "expert"  # the frequencies hold at any cost

    @property
    def depth(self) -> int:
        return list(DebugLevel).index(self)


@dataclass(frozen=True, slots=True)
class MeasuredParts:
    """The parts of a training that are measured, from all settings together."""

    anything: bool
    explains_incidents: bool  # finds the origin of non-finite values, spikes and skipped updates
    activations: bool  # outputs of layers, and their gradients
    gradients: bool  # of parameters
    weights: bool  # parameters and their updates
    batches: bool
    in_full: bool  # histograms and batches on every observed step, not only on some
    memory: bool  # growth, and the owners of leaked tensors
    memory_logged: bool
    memory_every: int | None  # steps between two listings of the tensors in memory
    lines: bool  # occasional profiles of a step by line and layer
    lines_every: int | None  # steps between two profiles, at any cost
    times: bool  # durations of the phases of every step
    observed_every: int | None  # steps observed at any cost, in addition to those within the budget

    @property
    def statistics(self) -> bool:
        """Whether any part is measured on observed steps only."""
        return self.activations or self.gradients or self.weights or self.batches or self.memory

    @classmethod
    def from_config(cls, config: DebugConfig) -> MeasuredParts:
        mode, depth = config.mode, config.level.depth
        full, expert = mode is DebugMode.FULL_DEBUG, depth >= DebugLevel.EXPERT.depth
        layers = depth >= DebugLevel.INTERMEDIATE.depth
        gradients = (full or mode is DebugMode.GRADIENT_CHECKING) and config.enable_gradient_debugging
        memory = (full or mode is DebugMode.MEMORY_PROFILING) and config.enable_memory_profiling
        lines = (full or mode is DebugMode.PERFORMANCE_PROFILING) and config.enable_performance_profiling
        inspects = (full or mode is DebugMode.GRADIENT_CHECKING) and config.enable_tensor_inspection
        return cls(
            anything=mode is not DebugMode.NONE,
            explains_incidents=(full or mode is DebugMode.ANOMALY_DETECTION) and config.enable_anomaly_detection,
            activations=inspects and config.log_activations and layers,
            gradients=gradients and config.log_gradients,
            weights=full and config.enable_model_diagnostics and config.log_weights and layers,
            batches=(full or mode is DebugMode.ANOMALY_DETECTION) and config.enable_tensor_inspection,
            in_full=depth >= DebugLevel.ADVANCED.depth,
            memory=memory,
            memory_logged=memory and config.log_memory,
            memory_every=config.memory_profiling_frequency if memory and config.log_memory and (expert or not full) else None,
            lines=lines and (layers or not full),
            lines_every=config.performance_profiling_frequency if lines and (expert or not full) else None,
            times=mode is not DebugMode.NONE and config.log_performance,
            observed_every=config.gradient_checking_frequency if gradients and (expert or not full) else None,
        )

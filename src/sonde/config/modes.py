"""What a mode and a level mean: the table of docs/guide/configuration.md, as code.

A mode chooses aspects of a training, a level how deep each of them is looked into. The single settings (`enable_…`, `log_…`) take away
from that; none adds what the mode leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sonde.config.settings import DebugConfig


class DebugMode(StrEnum):
    """Which aspects of a training are measured."""

    NONE = "none"  # nothing is watched: a run with a beginning and an end
    ANOMALY_DETECTION = "anomaly_detection"  # bad numbers and leaps, and where they come from
    GRADIENT_CHECKING = "gradient_checking"  # gradients of parameters and of what layers put out
    MEMORY_PROFILING = "memory_profiling"  # memory of the process and of the tensors, and who keeps it
    PERFORMANCE_PROFILING = "performance_profiling"  # steps line by line and layer by layer
    FULL_DEBUG = "full_debug"  # all of it


class DebugLevel(StrEnum):
    """How deep they are looked into. Each level has what those before it have."""

    BASIC = "basic"  # per parameter and per process; no layers, no lines
    INTERMEDIATE = "intermediate"  # layers, weights and updates, lines
    ADVANCED = "advanced"  # every observed step in full: histograms and batches too
    EXPERT = "expert"  # and the frequencies hold whatever they cost

    @property
    def depth(self) -> int:
        return list(DebugLevel).index(self)


@dataclass(frozen=True, slots=True)
class MeasuredParts:
    """What is measured, as all settings say together."""

    anything: bool
    looks_back: bool  # at a bad number, a leap, a skipped update: where it comes from
    activations: bool  # what layers put out, and the gradients of that
    gradients: bool  # of parameters
    weights: bool  # parameters and their updates
    batches: bool
    in_full: bool  # histograms and batches on every observed step, not only on some
    memory: bool  # does it grow, and who keeps it
    memory_logged: bool
    memory_every: int | None  # steps: what the memory is taken by
    lines: bool  # now and then a step line by line and layer by layer
    lines_every: int | None  # steps, whatever it costs
    times: bool  # of the phases of every step
    observed_every: int | None  # steps: observed at any price, beside those that the budget allows

    @property
    def statistics(self) -> bool:
        """Whether anything at all is measured on observed steps only."""
        return self.activations or self.gradients or self.weights or self.batches or self.memory

    @classmethod
    def of(cls, config: DebugConfig) -> MeasuredParts:
        mode, depth = config.mode, config.level.depth
        full, expert = mode is DebugMode.FULL_DEBUG, depth >= DebugLevel.EXPERT.depth
        layers = depth >= DebugLevel.INTERMEDIATE.depth
        gradients = (full or mode is DebugMode.GRADIENT_CHECKING) and config.enable_gradient_debugging
        memory = (full or mode is DebugMode.MEMORY_PROFILING) and config.enable_memory_profiling
        lines = (full or mode is DebugMode.PERFORMANCE_PROFILING) and config.enable_performance_profiling
        inspects = (full or mode is DebugMode.GRADIENT_CHECKING) and config.enable_tensor_inspection
        return cls(
            anything=mode is not DebugMode.NONE,
            looks_back=(full or mode is DebugMode.ANOMALY_DETECTION) and config.enable_anomaly_detection,
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

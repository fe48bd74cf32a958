"""What mode, level and log settings of a DebugConfig mean for a debugged loop."""

from __future__ import annotations

from dataclasses import dataclass

from sonde.config import DebugConfig, DebugLevel, DebugMode


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Times, memory of the process and norms are measured in every mode but NONE; the rest depends on mode, level and log settings."""

    anything: bool
    torch_anomaly: bool  # torch's own anomaly mode during the operations
    finds_cause: bool  # a step with NaN or Inf is run again to find the operation that produced it
    gradients: bool
    layers: bool  # gradients by layer
    updates: bool  # change of the parameters by an optimizer step: needs a copy of them
    memory: bool
    tensors: bool  # memory of parameters, gradients and optimizer state
    performance: bool
    output_statistics: bool
    weight_statistics: bool
    logs_memory: bool  # in the histories, the lines and the report
    logs_times: bool

    @classmethod
    def of(cls, config: DebugConfig) -> LoopOptions:
        measured, depth = config.measured, config.level.depth
        is_intermediate, is_advanced = depth >= DebugLevel.INTERMEDIATE.depth, depth >= DebugLevel.ADVANCED.depth
        profiles = config.mode in (DebugMode.FULL_DEBUG, DebugMode.PERFORMANCE_PROFILING)
        return cls(
            anything=measured.anything,
            torch_anomaly=config.mode is DebugMode.ANOMALY_DETECTION,
            finds_cause=measured.explains_incidents,
            gradients=measured.gradients,
            layers=measured.gradients and is_intermediate,
            updates=measured.gradients and is_advanced,
            memory=measured.memory,
            tensors=measured.memory_logged and is_intermediate,
            performance=profiles and config.enable_performance_profiling,
            output_statistics=measured.activations,
            weight_statistics=measured.weights,
            logs_memory=measured.anything and config.log_memory,
            logs_times=measured.times,
        )

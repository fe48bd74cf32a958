"""What a mode and a level of DebugConfig mean for a loop that is debugged by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LEVELS = ("BASIC", "INTERMEDIATE", "ADVANCED", "EXPERT")


@dataclass(frozen=True, slots=True)
class Measured:
    """Times, memory of the process and norms are taken in every mode but NONE; what costs more depends on mode and level."""

    anything: bool
    torch_anomaly: bool  # torch's own anomaly mode, inside of the operations
    layers: bool  # gradients layer by layer
    updates: bool  # how much an optimizer's step changes the parameters: needs a copy of them
    tensors: bool  # which memory is parameters, gradients, optimizer state, activations

    @classmethod
    def of(cls, config: Any) -> Measured:
        mode, deep = _name(config, "mode", "FULL_DEBUG"), LEVELS.index(_name(config, "level", LEVELS[1]))
        full = mode == "FULL_DEBUG"
        gradients = (full or mode == "GRADIENT_CHECKING") and getattr(config, "enable_gradient_debugging", True)
        memory = (full or mode == "MEMORY_PROFILING") and getattr(config, "enable_memory_profiling", True)
        anomaly = mode == "ANOMALY_DETECTION" and getattr(config, "enable_anomaly_detection", True)
        return cls(mode != "NONE", anomaly, gradients and deep >= 1, gradients and deep >= 2, memory and deep >= 1)


def _name(config: Any, field: str, default: str) -> str:
    value = getattr(config, field, default)
    return str(getattr(value, "name", value)).upper()

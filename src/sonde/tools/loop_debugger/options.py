"""What the mode and the level of a DebugConfig mean for a loop that is debugged by hand."""

from __future__ import annotations

from dataclasses import dataclass

from sonde.config import DebugConfig, DebugLevel, DebugMode


@dataclass(frozen=True, slots=True)
class Asked:
    """Times, memory of the process and norms are taken in every mode but NONE; what costs more depends on mode and level."""

    anything: bool
    torch_anomaly: bool  # torch's own anomaly mode, inside of the operations
    looks_back: bool  # a bad step is run again, to find where the bad number was made
    layers: bool  # gradients layer by layer
    updates: bool  # how much an optimizer's step changes the parameters: needs a copy of them
    tensors: bool  # which memory is parameters, gradients, optimizer state, activations

    @classmethod
    def of(cls, config: DebugConfig) -> Asked:
        measured, depth = config.measured, config.level.depth
        deep, deeper = depth >= DebugLevel.INTERMEDIATE.depth, depth >= DebugLevel.ADVANCED.depth
        return cls(
            measured.anything, config.mode is DebugMode.ANOMALY_DETECTION, measured.looks_back, measured.gradients and deep,
            measured.gradients and deeper, measured.memory and deep,
        )  # fmt: skip

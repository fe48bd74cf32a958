"""DebugInfo: what is known of one operation of a training loop once it is over."""

from __future__ import annotations

from dataclasses import dataclass, field

from sonde.config import DebugLevel, DebugMode


@dataclass(slots=True)
class DebugInfo:
    """Filled when the operation has ended: until then, and where something is not measured, a number is None.

    `debug_context` yields it at the beginning. `loss` and `gradient_norm` may be set by whoever does the work: they are judged at the end.
    """

    timestamp: float  # seconds since 1970, when the operation began
    mode: DebugMode
    level: DebugLevel
    operation: str
    model_name: str = ""
    epoch: int = 0
    batch: int = 0
    execution_time: float | None = None  # seconds of the work itself, what Sonde measured in between left out
    memory_usage: float | None = None  # of the process in physical memory, MiB, at the end
    gpu_memory: float | None = None  # MiB of tensors on the GPU, at the end; 0 without one
    gradient_norm: float | None = None  # L2 norm of all gradients
    anomaly_detected: bool = False  # a number that is not finite, or a loss or gradient norm far outside of its usual range
    memory_leak_detected: bool = False  # memory grows with every step, steadily
    performance_issue_detected: bool = False  # it took far longer than this operation usually does
    loss: float | None = None
    param_norm: float | None = None  # L2 norm of all parameters
    notes: list[str] = field(default_factory=list)  # what was detected, in words
    error: str = ""  # the exception that ended it
    inside: str = ""  # the operation around it; "" for the outermost
    number: int = 0  # how many operations of this name there were before

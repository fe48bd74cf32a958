"""One operation of a training loop: its record (DebugInfo) and its timer (RunningOperation)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import datetime
from time import perf_counter_ns, thread_time_ns
from typing import Any

from sonde.config import DebugLevel, DebugMode
from sonde.profiler.utilization import num_preemptions
from sonde.tools.loop_debugger.measure_loop_operation import gpu_memory_mb, process_memory_mb, synchronize_devices


class LiveNumber:
    """A number of a DebugInfo: measured at each read while the operation runs, stored when it ends, 0.0 before."""

    def __init__(self, measure: Callable[[DebugInfo], float]) -> None:
        self._measure = measure

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, info: DebugInfo | None, owner: type | None = None) -> float:
        if info is None:
            return 0.0  # the default of the dataclass field
        return self._measure(info) if info.is_running else float(vars(info)[self._name])

    def __set__(self, info: DebugInfo, value: float) -> None:
        vars(info)[self._name] = value


@dataclass
class DebugInfo:
    """The numbers of one operation. A number that is not measured is 0.0. `debug_context` yields it when the operation starts; time and
    memory can be read inside the block. The block may set `loss` and `gradient_norm`: they are checked when it ends."""

    timestamp: datetime  # start of the operation, with the time zone
    mode: DebugMode
    level: DebugLevel
    operation: str
    model_name: str = ""
    epoch: int = 0
    batch: int = 0
    execution_time: LiveNumber = LiveNumber(lambda info: float(vars(info)["_clock"]()))  # seconds, without Sonde's own work
    memory_usage: LiveNumber = LiveNumber(lambda info: process_memory_mb())  # MiB of the process in physical memory
    gpu_memory: LiveNumber = LiveNumber(lambda info: gpu_memory_mb())  # MiB of tensors on all GPUs
    gradient_norm: float = 0.0  # L2 norm of all gradients
    anomaly_detected: bool = False  # an exception, a NaN or Inf, a gradient norm of zero, a spike of the loss or of the gradient norm
    memory_leak_detected: bool = False  # memory grows steadily
    performance_issue_detected: bool = False  # the operation took far longer than its usual time
    loss: float = 0.0
    param_norm: float = 0.0  # L2 norm of all parameters
    learning_rate: float = 0.0  # of the first parameter group
    update_norm: float = 0.0  # L2 norm of the change of all parameters
    update_ratio: float = 0.0  # update_norm / param_norm
    notes: list[str] = field(default_factory=list)  # one sentence per detected problem
    error: str = ""  # the exception that ended the operation
    inside: str = ""  # name of the enclosing operation; "": none
    number: int = 0  # earlier operations of this name

    @property
    def is_running(self) -> bool:
        """Whether the operation has started and not ended."""
        return "_clock" in vars(self)

    def start(self, clock: Callable[[], float]) -> None:
        """The operation starts; `clock` returns its seconds so far."""
        vars(self)["_clock"] = clock

    def end(self, execution_time: float) -> None:
        """The operation ends: store its time and the memory at its end."""
        vars(self).pop("_clock", None)
        self.execution_time = execution_time
        self.memory_usage, self.gpu_memory = process_memory_mb(), gpu_memory_mb()

    def to_dict(self) -> dict[str, Any]:
        """All fields, for a JSON document."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "timestamp": self.timestamp.isoformat(), "mode": self.mode.value, "level": self.level.value}


class RunningOperation:
    """Times an operation from `start_clock` to `stop_clock`, without Sonde's work for the operations inside."""

    def __init__(self, info: DebugInfo, entered_ns: int) -> None:
        self.info = info
        self.excluded_ns = 0
        self.is_checked = False  # loss and gradient norm are checked already, here or in an operation inside
        self.statistics: dict[str, dict[str, float]] = {}
        self._entered_ns = entered_ns
        self._start_ns = self._stop_ns = self._thread_ns = self._preemptions = 0

    def start_clock(self) -> None:
        """The work starts now. A later call replaces an earlier one."""
        synchronize_devices()
        self._preemptions, self._thread_ns = -num_preemptions(), -thread_time_ns()
        self._start_ns = perf_counter_ns()

    def stop_clock(self) -> None:
        """The work is done, on devices too. The first call counts."""
        if not self._stop_ns:
            synchronize_devices()
            self._stop_ns = perf_counter_ns()
            self._preemptions, self._thread_ns = self._preemptions + num_preemptions(), self._thread_ns + thread_time_ns()

    def seconds(self) -> float:
        """The time of the work, so far or in all."""
        return max(0, (self._stop_ns or perf_counter_ns()) - self._start_ns - self.excluded_ns) / 1e9

    def cpu_s(self) -> float | None:
        """The time of this thread on a processor, where other programs interrupted it; None where none did."""
        return self._thread_ns / 1e9 if self._preemptions else None

    def own_ns(self) -> int:
        """The time since the operation was entered that was not its work."""
        return perf_counter_ns() - self._entered_ns - round(self.seconds() * 1e9)

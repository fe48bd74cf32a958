"""What is measured around the operations of a loop: memory of the process and norms always, the rest by mode and level of a DebugConfig."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sonde.capture import process_memory
from sonde.config import DebugConfig, DebugLevel
from sonde.events import STATISTICS
from sonde.statistics.find_tensors import find_tensors, memory_by_category
from sonde.statistics.parameter_snapshot import ParameterSnapshot
from sonde.statistics.reductions import check_finite
from sonde.statistics.tensor_statistics_table import StatisticsTable
from sonde.tools.gradient_debugger import GradientDebugger

if TYPE_CHECKING:
    from sonde.tools.loop_debugger.loop_operation_record import DebugInfo


MIB = 2**20
NUM_FIRST = 3  # steps whose layers and weights are always measured: one step is not representative

_L2 = STATISTICS.index("l2")


def has_cuda() -> bool:
    """Whether this process uses a CUDA device. The question itself must not initialize CUDA."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def synchronize_devices() -> None:
    """Wait for the work that was submitted to devices: a clock that is read earlier does not include it."""
    if has_cuda():  # pragma: no cover - no such device here
        torch.cuda.synchronize()
    elif hasattr(torch, "mps") and torch.backends.mps.is_available():  # pragma: no cover
        torch.mps.synchronize()


def process_memory_mb() -> float:
    """Of this process in physical memory; 0.0 where the system does not report it."""
    return (process_memory.rss() or 0) / MIB


def gpu_memory_mb() -> float:
    """Of tensors on all GPUs; 0.0 without one."""
    return sum(torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count())) / MIB if has_cuda() else 0.0


def memory_details() -> dict[str, float | str | None]:
    """MiB: peak and limit of the process, and its heap; None where the system does not report it."""
    heap, peak, limit = process_memory.heap(), process_memory.peak_rss(), process_memory.limit()
    return {
        "peak": max(peak / MIB, process_memory_mb()) if peak else None,  # the system updates the peak later than the present value
        "limit": limit.num_bytes / MIB if limit else None, "limit_by": limit.by if limit else "",
        "heap_used": heap.used / MIB if heap else None, "heap_held": heap.held / MIB if heap else None,
    }  # fmt: skip


def is_finite(value: Any) -> bool:
    """Whether every element of every tensor in this value is finite."""
    tensors = [tensor for _, tensor in find_tensors(value)]
    return check_finite([tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()])[1] < 0


def l2_norm(tensors: Sequence[Tensor | None]) -> tuple[float, int]:
    """The norm of all tensors as one vector, and the index of the first tensor with a non-finite value (-1: none)."""
    square, first_bad = check_finite(tensors)
    return math.sqrt(square) if square >= 0 else square, first_bad


def param_norm(model: nn.Module) -> float:
    return l2_norm(list(model.parameters()))[0]


def statistics_by_name(named: Sequence[tuple[str, Tensor]]) -> dict[str, dict[str, float]]:
    """The statistics of each tensor: count, mean, std, min, max, L2 norm, zeros, NaN, Inf."""
    table = StatisticsTable(len(named))
    table.measure(0, [tensor for _, tensor in named])
    table.synchronize()
    return {name: dict(zip(STATISTICS, row)) for (name, _), row in zip(named, table.values.tolist())}


def batch_size(x: Any) -> int | None:
    return next((len(tensor) for _, tensor in find_tensors(x) if tensor.ndim), None)


class LoopMeasurements:
    """Measures the gradients, parameters and memory of one loop, each at the frequency that the settings name."""

    def __init__(self, config: DebugConfig) -> None:
        measured, depth = config.measured, config.level.depth
        self._measures_layers = measured.gradients and depth >= DebugLevel.INTERMEDIATE.depth
        self._measures_updates = measured.gradients and depth >= DebugLevel.ADVANCED.depth  # needs a copy of the parameters
        self._measures_weights = measured.weights
        self._measures_memory = measured.memory_logged and depth >= DebugLevel.INTERMEDIATE.depth  # of tensors, by category
        self._gradients_every, self._memory_every = config.gradient_checking_frequency, config.memory_profiling_frequency
        self._snapshot = ParameterSnapshot(config.max_update_memory_mb * MIB)
        self._num_backwards = self._num_updates = 0
        self.layers = GradientDebugger(config.max_gradient_history)
        self.memory_by_category: dict[str, float] = {}  # MiB, at the last measurement

    def after_backward(self, model: nn.Module) -> tuple[float, str, bool]:
        """The norm of all gradients, the first parameter whose gradient is not finite ("": none), and whether there are gradients."""
        named = [(path, p) for path, p in model.named_parameters() if p.requires_grad]
        gradients = [p.grad for _, p in named]
        norm, first_bad = l2_norm(gradients)
        if self._measures_layers and self._is_due(self._num_backwards):
            self.layers.record_model(model)
        self._num_backwards += 1
        return norm, named[first_bad][0] if first_bad >= 0 else "", any(gradient is not None for gradient in gradients)

    def before_update(self, model: nn.Module) -> None:
        if self._measures_updates:
            parameters = list(model.parameters())
            self._snapshot.take(parameters, StatisticsTable(len(parameters)), 0)

    def after_update(self, info: DebugInfo, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, float]]:
        """Measures the parameters into `info`. Returns their statistics by name, where due."""
        parameters = list(model.parameters())
        info.param_norm, _ = l2_norm(parameters)
        info.learning_rate = next((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), 0.0)
        if self._measures_updates and self._snapshot.available:
            table = StatisticsTable(len(parameters))
            self._snapshot.diff(parameters, table, 0)
            table.synchronize()
            info.update_norm = math.hypot(*table.values[:, _L2].tolist())
            info.update_ratio = info.update_norm / info.param_norm if info.param_norm else 0.0
        weights: dict[str, dict[str, float]] = {}
        if self._measures_weights and self._is_due(self._num_updates):
            weights = statistics_by_name(list(model.named_parameters()))
        if self._measures_memory and not self._num_updates % self._memory_every:
            self.memory_by_category = {name: used / MIB for name, used in memory_by_category({"": model}, [optimizer]).items()}
        self._num_updates += 1
        return weights

    def _is_due(self, number: int) -> bool:
        return number < NUM_FIRST or not number % self._gradients_every

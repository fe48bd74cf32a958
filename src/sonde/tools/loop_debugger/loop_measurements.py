"""What is measured around the operations of a loop, and which of it by mode and level of a DebugConfig."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sonde.capture import process_memory
from sonde.config import DebugConfig, DebugLevel, DebugMode
from sonde.events import STATISTICS
from sonde.statistics.find_tensors import find_tensors, memory_by_category
from sonde.statistics.parameter_snapshot import ParameterSnapshot
from sonde.statistics.reductions import check_finite
from sonde.statistics.tensor_statistics_table import StatisticsTable
from sonde.tools.gradient_debugger import GradientDebugger


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
            anything=measured.anything, torch_anomaly=config.mode is DebugMode.ANOMALY_DETECTION, finds_cause=measured.explains_incidents,
            gradients=measured.gradients, layers=measured.gradients and is_intermediate, updates=measured.gradients and is_advanced,
            memory=measured.memory, tensors=measured.memory_logged and is_intermediate,
            performance=profiles and config.enable_performance_profiling, output_statistics=measured.activations,
            weight_statistics=measured.weights, logs_memory=measured.anything and config.log_memory, logs_times=measured.times,
        )  # fmt: skip


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
    if not has_cuda():
        return 0.0
    return sum(torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count())) / MIB  # pragma: no cover


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


def statistics_by_name(named: Sequence[tuple[str, Tensor]]) -> dict[str, dict[str, float]]:
    """The statistics of each tensor: count, mean, std, min, max, L2 norm, zeros, NaN, Inf."""
    table = StatisticsTable(len(named))
    table.measure(0, [tensor for _, tensor in named])
    table.synchronize()
    return {name: dict(zip(STATISTICS, row)) for (name, _), row in zip(named, table.values.tolist())}


def batch_size(x: Any) -> int | None:
    return next((len(tensor) for _, tensor in find_tensors(x) if tensor.ndim), None)


class GradientMeasurement(NamedTuple):
    """The gradients after a backward pass."""

    norm: float
    num_with: int  # trainable parameters that have a gradient
    first_bad: str  # the first parameter whose gradient is not finite; "": none


class UpdateMeasurement(NamedTuple):
    """The parameters after an optimizer step."""

    param_norm: float
    learning_rate: float
    update_norm: float
    update_ratio: float
    weights: dict[str, dict[str, float]]  # statistics by parameter, where due


class LoopMeasurements:
    """Measures the gradients, parameters and memory of one loop, each at the frequency that the settings name."""

    def __init__(self, config: DebugConfig) -> None:
        self._options = LoopOptions.of(config)
        self._gradients_every, self._memory_every = config.gradient_checking_frequency, config.memory_profiling_frequency
        self._snapshot = ParameterSnapshot(config.max_update_memory_mb * MIB)
        self._num_backwards = self._num_updates = 0
        self.layers = GradientDebugger(config.max_gradient_history)
        self.memory_by_category: dict[str, float] = {}  # MiB, at the last measurement

    def after_backward(self, model: nn.Module) -> GradientMeasurement:
        named = [(path, p) for path, p in model.named_parameters() if p.requires_grad]
        gradients = [p.grad for _, p in named]
        norm, first_bad = l2_norm(gradients)
        if self._options.layers and self._is_due(self._num_backwards, self._gradients_every):
            self.layers.record_model(model)
        self._num_backwards += 1
        num_with = sum(gradient is not None for gradient in gradients)
        return GradientMeasurement(norm, num_with, named[first_bad][0] if first_bad >= 0 else "")

    def before_update(self, model: nn.Module) -> None:
        if self._options.updates:
            parameters = list(model.parameters())
            self._snapshot.take(parameters, StatisticsTable(len(parameters)), 0)

    def after_update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> UpdateMeasurement:
        parameters = list(model.parameters())
        norm, _ = l2_norm(parameters)
        rate = next((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), 0.0)
        moved = ratio = 0.0
        if self._options.updates and self._snapshot.available:
            table = StatisticsTable(len(parameters))
            self._snapshot.diff(parameters, table, 0)
            table.synchronize()
            moved = math.hypot(*table.values[:, _L2].tolist())
            ratio = moved / norm if norm else 0.0
        weights: dict[str, dict[str, float]] = {}
        if self._options.weight_statistics and self._is_due(self._num_updates, self._gradients_every):
            weights = statistics_by_name(list(model.named_parameters()))
        if self._options.tensors and not self._num_updates % self._memory_every:
            held = memory_by_category({"": model}, [optimizer])
            self.memory_by_category = {category: num_bytes / MIB for category, num_bytes in held.items()}
        self._num_updates += 1
        return UpdateMeasurement(norm, rate, moved, ratio, weights)

    @staticmethod
    def _is_due(number: int, every: int) -> bool:
        return number < NUM_FIRST or not number % every

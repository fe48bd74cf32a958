"""What is measured around the operations of a loop: norms, memory, and how layers and tensors share in them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture import process_memory
from sonde.config import DebugConfig
from sonde.events import STATISTICS
from sonde.memory_profiler.memory_profiler import MemoryProfiler
from sonde.memory_profiler.memory_report import CATEGORIES
from sonde.statistics import reductions
from sonde.statistics.snapshot import ParameterSnapshot
from sonde.statistics.table import StatisticsTable
from sonde.statistics.tensor_utils import find_tensors
from sonde.tools.gradient_debugger import GradientDebugger
from sonde.tools.loop_debugger.options import Asked

MIB = 2**20
FIRST = 3  # steps whose layers are always looked at: one is chance
NOTHING: dict[str, Any] = {"loss": None, "gradient_norm": None, "num_without_gradient": None, "first_bad": ""}


def has_cuda() -> bool:
    """Whether this process uses a CUDA device; asking must not make it use one."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def wait_for_devices() -> None:
    """Work on a device goes on after the call that asked for it: a clock that is read before it has ended tells nothing."""
    if has_cuda():  # pragma: no cover - no such device here
        torch.cuda.synchronize()
    elif hasattr(torch, "mps") and torch.backends.mps.is_available():  # pragma: no cover
        torch.mps.synchronize()


def process_memory_mb() -> float | None:
    used = process_memory.rss()
    return used / MIB if used is not None else None


def gpu_memory_mb() -> float:
    """Of tensors on all GPUs; 0 without one."""
    if not has_cuda():
        return 0.0
    return sum(torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count())) / MIB  # pragma: no cover


def is_finite(value: Any) -> bool:
    """Whether every number in the tensors of this value is finite."""
    return reductions.check_finite([tensor for _, tensor in find_tensors(value)])[1] < 0


def batch_size(x: Any) -> int | None:
    return next((len(tensor) for _, tensor in find_tensors(x) if tensor.ndim), None)


@contextmanager
def anomaly_mode(*, check_nan: bool) -> Iterator[None]:
    """torch's own anomaly mode inside; afterwards it is as the user had it, after exceptions too."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    inside = True, check_nan or (before[0] and before[1])
    torch.autograd.set_detect_anomaly(*inside)
    try:
        yield
    finally:
        # Where the user has changed it inside, that is what the user wants.
        if (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == inside:
            torch.autograd.set_detect_anomaly(*before)


class Meter:
    """Measures one loop. Models and optimizers are only known while somebody else holds them."""

    def __init__(self, config: DebugConfig) -> None:
        self._asked = Asked.of(config)
        self._every_layers, self._every_tensors = config.gradient_checking_frequency, config.memory_profiling_frequency
        self._model: weakref.ref[nn.Module] | None = None
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._kept = ParameterSnapshot(config.max_update_memory_mb * MIB)
        self._num_updates = 0
        self.layers = GradientDebugger(config.max_gradient_history)
        self.tensors: list[tuple[int, dict[str, float]]] = []  # update, MiB by category

    def know(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)

    def gradients(self, loss: Tensor, model: nn.Module, number: int) -> dict[str, Any]:
        """After a backward."""
        named = [(path, p) for path, p in model.named_parameters() if p.requires_grad]
        given = [p.grad for _, p in named]
        square, first_bad = reductions.check_finite(given)
        if self._asked.layers and (number < FIRST or not number % self._every_layers):
            self.layers.record_model(model)
        there = any(gradient is not None for gradient in given)
        return {
            "loss": float(loss.detach()), "gradient_norm": math.sqrt(square) if there and square >= 0 else square if there else None,
            "num_without_gradient": sum(gradient is None for gradient in given), "first_bad": named[first_bad][0] if first_bad >= 0 else "",
        }  # fmt: skip

    def before_update(self, model: nn.Module) -> None:
        if self._asked.updates:
            parameters = list(model.parameters())
            self._kept.take(parameters, StatisticsTable(len(parameters)), 0)

    def after_update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """After an optimizer's step."""
        found: dict[str, Any] = {"param_norm": None, "update_norm": None, "update_ratio": None, "learning_rate": None}
        if not self._asked.anything:
            return found
        parameters = list(model.parameters())
        square, _ = reductions.check_finite(parameters)
        found["param_norm"] = norm = math.sqrt(square) if square >= 0 else square
        found["learning_rate"] = next((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), None)
        if self._asked.updates and self._kept.available:
            rows = StatisticsTable(len(parameters))
            self._kept.diff(parameters, rows, 0)
            rows.synchronize()
            found["update_norm"] = moved = math.hypot(*rows.values[:, _L2].tolist())
            found["update_ratio"] = moved / norm if norm else None
        if self._asked.tensors and not self._num_updates % self._every_tensors:
            self.tensors.append((self._num_updates, self._by_category(model, optimizer)))
        self._num_updates += 1
        return found

    def memory_now(self) -> dict[str, Any]:
        """MiB of everything that can be told."""
        used, heap, peak, limit = process_memory_mb(), process_memory.heap(), process_memory.peak_rss(), process_memory.limit()
        found: dict[str, Any] = {
            "cpu_memory": used,
            "cpu_peak": max(peak / MIB, used or 0.0) if peak else None,  # the system counts it a little later than the present
            "cpu_limit": limit.num_bytes / MIB if limit else None,
            "cpu_limit_by": limit.by if limit else "", "heap_used": heap.used / MIB if heap else None,
            "heap_held": heap.held / MIB if heap else None, "gpu_memory": gpu_memory_mb(), "gpu_reserved": 0.0,
        }  # fmt: skip
        if has_cuda():  # pragma: no cover - no such device here
            found["gpu_reserved"] = sum(torch.cuda.memory_reserved(i) for i in range(torch.cuda.device_count())) / MIB
        model = self._model() if self._model is not None else None
        optimizer = self._optimizer() if self._optimizer is not None else None
        found["tensors"] = self._by_category(model, optimizer) if model is not None else {}
        return found

    @staticmethod
    def _by_category(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, float]:
        """Of all devices together."""
        usage = MemoryProfiler(model, optimizer).snapshot("now").usage.values()
        return {category: sum(one.by_category()[category] for one in usage) / MIB for category in CATEGORIES}


_L2 = STATISTICS.index("l2")

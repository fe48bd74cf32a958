"""The memory of the process, and whether graphs of earlier steps are still alive. Where either grows, or memory exceeds a threshold of the
user's, that is an incident."""

import logging
import weakref
from typing import Any

import torch
from torch import nn

from sonde.capture import process_memory
from sonde.capture.incident_types import MemoryGrowthIncident
from sonde.capture.probes.probe import Probe, ProbeContext
from sonde.events import MemoryLimitFound
from sonde.formatting import size
from sonde.memory_trend import MB, MemoryThreshold, MemoryTrend
from sonde.statistics.find_tensors import find_tensors, storage_bytes

MAX_GRAPHS = 32  # that are remembered; beyond, every second is forgotten
ONE_BY_ONE = 64  # steps: memory is read wherever they are observed; later at intervals, since asking the system takes time
INTERVAL, LONG_INTERVAL, LONG_RUN = 8, 64, 1024  # memory is read every 8 steps, every 64 from step 1024 on
KEPT_GRAPHS = 8  # of different steps: a variable or two keep the last one or two alive
KEPT_STEPS = 40  # over which these are spread
GROWN_MB = 24.0  # a growth worth an investigation
TREND_INTERVAL = 64  # steps: whether memory grows takes a hundred microseconds to compute
MAX_INCIDENTS = 2  # in one run: an investigation takes a fraction of a second
INVESTIGATED_STEPS = 16  # after an incident: a second one needs a growth of its own


_log = logging.getLogger("sonde")


class _GraphToken:
    """Lives as long as the graph that it was put into."""

    __slots__ = ("__weakref__",)


class MemoryProbe(Probe):
    """Records the memory of the process and counts graphs of earlier steps that are still alive."""

    name = "memory_usage"
    OBSERVED_CALLBACKS = Probe.OBSERVED_CALLBACKS | {"on_forward_start", "on_forward_end"}

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._is_logged = context.measured.memory_logged
        self._growth = MemoryTrend()
        self._threshold = _threshold(context)
        self._graphs: list[tuple[int, weakref.ref[_GraphToken]]] = []  # step, and whether its graph lives
        self._num_incidents = 0
        self._quiet_until = -1  # step
        self._is_limit_recorded = False
        self.outside_bytes = 0  # of the heap when the first forward began: what belongs to no model

    @property
    def is_enabled(self) -> bool:
        return self._context.measured.memory

    def on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.outside_bytes:
            heap = process_memory.heap()
            parameters = storage_bytes(parameter for each in self._context.models for _, parameter in each.parameters())
            self.outside_bytes = max(1, heap.used - parameters) if heap is not None else 1

    def on_forward_end(self, module: nn.Module, output: Any) -> None:
        if not self._state.is_first_forward:
            return
        step = self._state.number
        for _, tensor in find_tensors(output)[:1]:
            node: Any = tensor.grad_fn
            if node is not None and (not self._graphs or self._graphs[-1][0] != step):
                token = node.metadata["sonde"] = _GraphToken()
                self._graphs.append((step, weakref.ref(token)))
                if len(self._graphs) > MAX_GRAPHS:
                    del self._graphs[1::2]

    def on_step_end(self) -> MemoryGrowthIncident | None:
        step = self._state.number
        if not is_interval(step):
            return None
        if self._read(step):
            return self._report(step)
        return self._report(step) if step % TREND_INTERVAL == 0 and self._growth.trend(GROWN_MB) is not None else None

    def collect(self) -> MemoryGrowthIncident | None:
        step = self._state.number
        if not self._is_limit_recorded and (limit := process_memory.limit()) is not None:
            self._recorder.emit(MemoryLimitFound(**limit._asdict()), step)
        self._is_limit_recorded = True
        is_exceeded = step < ONE_BY_ONE and not is_interval(step) and self._read(step)
        self._graphs = [graph for graph in self._graphs if graph[1]() is not None]
        alive = [made for made, _ in self._graphs if made < step - 1]
        if self._is_logged:
            self._state.scalars["kept_graphs"] = float(len(alive))
        return self._report(step) if is_exceeded or (len(alive) >= KEPT_GRAPHS and step - alive[0] >= KEPT_STEPS) else None

    def _read(self, step: int) -> bool:
        """Record the memory. Returns whether it exceeds the threshold of the user's for the first time."""
        resident = process_memory.rss()
        if resident is not None:
            if self._is_logged:
                self._state.scalars["rss_mb"] = resident / MB
            self._growth.update(step, resident / MB)
        if self._is_logged and torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # not run on a machine with CUDA; it does not synchronize
            self._state.scalars["cuda_mb"] = torch.cuda.memory_allocated() / MB
        threshold = self._threshold
        if threshold is None or resident is None or resident <= threshold.num_bytes:
            return False
        self._threshold = None
        more = f"more than {threshold.setting} allows ({size(threshold.num_bytes)})"
        _log.warning("sonde: the process uses %s of memory in step %d, %s.", size(resident), step, more)
        return True

    def _report(self, step: int) -> MemoryGrowthIncident | None:
        if self._num_incidents >= MAX_INCIDENTS or step < self._quiet_until:
            return None
        self._num_incidents += 1
        self._quiet_until = step + INVESTIGATED_STEPS
        self._growth = MemoryTrend()
        return MemoryGrowthIncident(step=step)


def _threshold(context: ProbeContext) -> MemoryThreshold | None:
    config, limit = context.config, process_memory.limit()
    return MemoryThreshold.from_settings(config.memory_threshold_mb, config.memory_threshold_share, limit.num_bytes if limit else None)


def is_interval(step: int) -> bool:
    return step % (INTERVAL if step < LONG_RUN else LONG_INTERVAL) == 0

"""The MemoryProfiler: which tensors use the memory of a training, its peak, leaks, and forecasts for other sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from sonde.capture import process_memory
from sonde.config import DebugConfig
from sonde.errors import SondeError
from sonde.formatting import size
from sonde.leaks.leak_detector import LeakDetector
from sonde.memory_profiler.allocation_tracker import AllocationTracker
from sonde.memory_profiler.batch_size_forecast import forecast, peak_usage
from sonde.memory_profiler.memory_of_run import Source, snapshots_of_run
from sonde.memory_profiler.memory_report import (
    AccumulatedTensors,
    DeviceMemory,
    MemoryForecast,
    MemoryReport,
    Peak,
    ProcessMemory,
    Snapshot,
    Usage,
)
from sonde.memory_trend import MemoryThreshold


class MemoryProfiler:
    """Tracks the allocations of every operation between `start()` and `stop()`, by module and phase. `snapshot(label)` also works without
    `start()`: it counts the live tensors. Models that are not passed are found when they are called. A report notes that the process used
    more than `memory_threshold_mb`, or than `memory_threshold_share` of what it may use."""

    def __init__(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None, *, memory_threshold_mb: float | None = None,
        memory_threshold_share: float | None = None,
    ) -> None:  # fmt: skip
        DebugConfig(memory_threshold_mb=memory_threshold_mb, memory_threshold_share=memory_threshold_share)  # refuses invalid values
        limit = process_memory.limit()
        limit_bytes = None if limit is None else limit.num_bytes
        self._threshold = MemoryThreshold.from_settings(memory_threshold_mb, memory_threshold_share, limit_bytes)
        self._models: dict[str, nn.Module] = {}
        self._optimizers: list[Optimizer] = []
        self._tracker: AllocationTracker | None = None  # while it runs
        self._last_tracker: AllocationTracker | None = None  # runs now or ran last
        self._leaks: LeakDetector | None = None
        self._found_leaks: tuple[AccumulatedTensors, ...] = ()
        self._leaks_checked_at = -1  # number of steps at the last search for leaks
        self._snapshots: list[Snapshot] = []
        self._unknown: tuple[str, ...] = ()  # what a run does not tell
        self._baseline = ProcessBaseline()
        self._start = perf_counter()
        if model is not None:
            self.attach(model, optimizer)

    @classmethod
    def from_run(cls, run: Source) -> Self:
        """The memory of a run: some of its steps as snapshots."""
        profiler = cls()
        profiler._snapshots = snapshots_of_run(run)
        if not any("optimizer state" in usage.by_place for one in profiler._snapshots for usage in one.usage.values()):
            profiler._unknown = ("the run does not hold the size of the optimizer state, so it is not part of these totals",)
        return profiler

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None, *, name: str = "") -> Self:
        """Adds a model and the optimizer that trains it. Paths of the first model have no prefix, those of others start with `name`."""
        if not isinstance(model, nn.Module):
            raise SondeError(f"a MemoryProfiler takes a torch.nn.Module, not a {type(model).__name__}.")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise SondeError(f"optimizer must be a torch.optim.Optimizer, not a {type(optimizer).__name__}.")
        self._models[name or ("" if not self._models else f"{type(model).__name__}{len(self._models)}")] = model
        if optimizer is not None:
            self._optimizers.append(optimizer)
        return self

    def start(self) -> Self:
        """Start tracking. It costs some tens of microseconds per operation."""
        if self._tracker is not None:
            raise SondeError("this memory profiler is running already. Call stop() first, or take a snapshot().")
        self._leaks, self._found_leaks, self._leaks_checked_at = LeakDetector(), (), -1
        self._snapshots.clear()
        tracker = AllocationTracker(self._models, self._optimizers, on_step=self._leaks.step)
        self._start, self._baseline = tracker.registry.start, ProcessBaseline.of(tracker)
        self._tracker = self._last_tracker = tracker.__enter__()
        return self

    def stop(self) -> MemoryReport:
        """Stop tracking and return the report. All hooks are removed."""
        report = self.report()
        self.close()
        return report

    def __enter__(self) -> Self:
        return self.start() if self._tracker is None else self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._tracker is not None and error is None:
            self._find_leaks()
        self.close()

    def close(self) -> None:
        """Stop tracking without a report; `report()` still works. Closing twice is allowed."""
        tracker, self._tracker = self._tracker, None
        self._leaks = None
        if tracker is not None:
            tracker.__exit__()

    def clear(self) -> None:
        """Discard all measurements and snapshots. Models and optimizers stay attached, and a running measurement starts again."""
        was_running = self._tracker is not None
        self.close()
        self._last_tracker, self._found_leaks, self._leaks_checked_at, self._unknown = None, (), -1, ()
        self._snapshots.clear()
        self._baseline, self._start = ProcessBaseline(), perf_counter()
        if was_running:
            self.start()

    def step(self) -> None:
        """Marks the end of a training step, for the search for leaks. Only needed in loops without a torch optimizer."""
        if self._leaks is not None:
            self._leaks_checked_at = -1
            self._leaks.step()

    def snapshot(self, label: str) -> Snapshot:
        """The live bytes now, stored under `label`."""
        tracker = self._tracker or AllocationTracker(self._models, self._optimizers)
        snapshot = Snapshot(str(label), perf_counter() - self._start, tracker.registry.usage(), _process_memory())
        self._snapshots.append(snapshot)
        return snapshot

    def report(self) -> MemoryReport:
        """The measurements so far. Call it inside the function that trains: leaks are named after its variables."""
        self._find_leaks()
        tracker = self._tracker or self._last_tracker
        if tracker is None:
            if not self._snapshots:
                raise SondeError("nothing was measured. Call start() before the training, or snapshot(label) inside it.")
            return self._with_threshold(self._report_of_snapshots())
        report = build_report(tracker, snapshots=tuple(self._snapshots), leaks=self._found_leaks, baseline=self._baseline)
        return self._with_threshold(report)

    def _with_threshold(self, report: MemoryReport) -> MemoryReport:
        threshold, peak = self._threshold, report.peak_rss
        if threshold is None or peak is None or peak <= threshold.num_bytes:
            return report
        note = f"the process used {size(peak)}, more than {threshold.setting} allows ({size(threshold.num_bytes)})"
        return replace(report, notes=(note, *report.notes))

    def _report_of_snapshots(self) -> MemoryReport:
        moments: dict[str, list[Peak]] = {}  # by device
        for one in self._snapshots:
            for device, usage in one.usage.items():
                moments.setdefault(device, []).append(Peak(usage, one.time_s))
        devices = {
            device: DeviceMemory(device, max(each, key=lambda one: one.usage.total), each[-1].usage) for device, each in moments.items()
        }
        note = "only snapshots were taken: memory between them, and activations held by autograd graphs, are not known"
        return _with_process_memory(MemoryReport(devices, tuple(self._snapshots), notes=(note, *self._unknown)))

    def _find_leaks(self) -> None:
        num_steps = self._tracker.num_steps if self._tracker is not None else 0
        if self._leaks is not None and num_steps != self._leaks_checked_at:  # the search takes a second
            self._leaks_checked_at = num_steps
            self._found_leaks = tuple(
                AccumulatedTensors(one.holder, one.num_bytes, one.num_tensors, one.num_nodes, one.per_step_bytes, one.cause, one.fix)
                for one in self._leaks.leaks()
            )

    def forecast(
        self, model: nn.Module | None = None, inputs: Any = None, *, batch_size: int | None = None, sequence_length: int | None = None,
        loss: Callable[[Any], Any] | None = None, optimizer: Optimizer | None = None, check: bool = True,
    ) -> MemoryForecast:  # fmt: skip
        """The peak of a training step at another batch size or sequence length, without using that memory.

        `model` and `optimizer` default to the attached ones. `inputs` are the arguments of forward (a tensor, a tuple of arguments, a dict
        of keyword arguments) at any size; their first dimension is the batch, their second the sequence. `loss` maps the model's output
        to the loss; without it the sum of the outputs is used. `check` also runs a copy of the model for real at a quarter of the size, to
        measure the error of fake tensors.
        """
        if model is None:
            model = next(iter(self._models.values()), None)
        if optimizer is None and model is next(iter(self._models.values()), None):
            optimizer = next(iter(self._optimizers), None)
        if not isinstance(model, nn.Module) or inputs is None:
            raise SondeError("a forecast needs a model and its inputs: profiler.forecast(model, inputs, batch_size=256)")
        measured = None
        if self._last_tracker is not None and loss is None:
            measured = (peak_usage(self._last_tracker).total, self._last_tracker.batch_size)
        with self._tracker.paused() if self._tracker is not None else nullcontext():
            return forecast(
                model, inputs, batch_size=batch_size, sequence_length=sequence_length, loss=loss, optimizer=optimizer, measured=measured,
                check=check,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProcessBaseline:
    """Memory of the process at the start of the measurement, without tensors."""

    rss: int | None = None
    outside: Mapping[str, int] = field(default_factory=dict)  # by device: bytes of its allocator that belong to no tensor

    @classmethod
    def of(cls, tracker: AllocationTracker) -> ProcessBaseline:
        tensors = {device: usage.total for device, usage in tracker.registry.usage().items()}
        counted = {device: _allocator_bytes(device)[0] for device in {*tensors, "cpu"}}
        outside = {device: num - tensors.get(device, 0) for device, num in counted.items() if num is not None}
        return cls(process_memory.rss(), outside)


def build_report(
    tracker: AllocationTracker, *, snapshots: tuple[Snapshot, ...] = (), leaks: tuple[AccumulatedTensors, ...] = (),
    baseline: ProcessBaseline | None = None, notes: tuple[str, ...] = (),
) -> MemoryReport:  # fmt: skip
    """The report of a tracker, which may still run."""
    now = tracker.registry.usage()
    baseline = baseline or ProcessBaseline()
    devices = {}
    for device, counts in tracker.registry.devices.items():
        allocated, reserved = (None, None) if tracker.is_fake else _allocator_bytes(device)
        devices[device] = DeviceMemory(
            device, counts.peak(), now.get(device, Usage()), tuple(counts.points), counts.batch_most, counts.batch_rest,
            allocated, reserved, baseline.outside.get(device),
        )  # fmt: skip
    report = MemoryReport(
        devices, snapshots, leaks, base_rss=baseline.rss, num_steps=tracker.num_steps, batch_size=tracker.batch_size,
        is_fake=tracker.is_fake, notes=(*tracker.notes, *notes),
    )  # fmt: skip
    return _with_process_memory(report)


def _with_process_memory(report: MemoryReport) -> MemoryReport:
    limit, by = process_memory.limit() or (None, "")
    process, peak = _process_memory(), process_memory.peak_rss()
    if peak is not None and process.rss is not None:
        peak = max(peak, process.rss)  # the system updates the two at different moments
    return replace(report, process=process, peak_rss=peak, limit=limit, limit_by=by)


def _process_memory() -> ProcessMemory:
    return ProcessMemory(process_memory.rss(), *(process_memory.heap() or (None, None)))


def _allocator_bytes(device: str) -> tuple[int | None, int | None]:
    """Allocated and reserved bytes, as counted by the allocator of a device. On the CPU these are the counts of malloc: torch has none."""
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    if device == "cpu":
        return process_memory.heap() or (None, None)
    return None, None

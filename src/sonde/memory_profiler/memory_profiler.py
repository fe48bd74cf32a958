"""MemoryProfiler: what the memory of a training is taken by, when it is most, what piles up, and what another size would need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from sonde.capture import process_memory
from sonde.errors import SondeError
from sonde.leaks.leak_detector import LeakDetector
from sonde.memory_profiler.allocation_tracker import Tracker
from sonde.memory_profiler.batch_size_forecast import Measured, forecast
from sonde.memory_profiler.memory_report import DeviceMemory, Forecast, Kept, MemoryReport, Peak, Process, Snapshot, Usage


class MemoryProfiler:
    """Between `start()` and `stop()` every operation is seen: which memory it made, for which module, in which phase.

    `snapshot(label)` also works without a start: then it counts what is alive. Models that are not named are found when they are called.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> None:
        self._models: dict[str, nn.Module] = {}
        self._optimizers: list[Optimizer] = []
        self._tracker: Tracker | None = None  # while it runs
        self._measured: Tracker | None = None  # that ran last
        self._leaks: LeakDetector | None = None
        self._kept: tuple[Kept, ...] = ()
        self._looked_at = -1  # after how many steps leaks were last looked for
        self._snapshots: list[Snapshot] = []
        self._base = Base()
        self._began = perf_counter()
        if model is not None:
            self.attach(model, optimizer)

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None, *, name: str = "") -> Self:
        """Names a model, and the optimizer that trains it. The first model's paths stand alone, those of others come after their name."""
        if not isinstance(model, nn.Module):
            raise SondeError(f"memory is named after the modules of a torch.nn.Module, not of a {type(model).__name__}.")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise SondeError(f"optimizer must be a torch.optim.Optimizer, not a {type(optimizer).__name__}.")
        self._models[name or ("" if not self._models else f"{type(model).__name__}{len(self._models)}")] = model
        if optimizer is not None:
            self._optimizers.append(optimizer)
        return self

    # -- measuring ---------------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin to see every operation. It costs some tens of microseconds for each."""
        if self._tracker is not None:
            raise SondeError("this memory profiler runs already. Call stop() first, or take a snapshot().")
        self._leaks, self._kept, self._looked_at = LeakDetector(), (), -1
        self._snapshots.clear()
        tracker = Tracker(self._models, self._optimizers, on_step=self._leaks.step)
        self._began, self._base = tracker.book.began, Base.of(tracker)
        self._tracker = self._measured = tracker.__enter__()
        return self

    def stop(self) -> MemoryReport:
        """End measuring and say what was found. What was put on the model is taken off again."""
        report = self.report()
        self.close()
        return report

    def __enter__(self) -> Self:
        return self.start() if self._tracker is None else self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._tracker is not None and error is None:
            self._look_for_leaks()
        self.close()

    def close(self) -> None:
        """End measuring without a word; what was measured stays. Closing twice is fine."""
        tracker, self._tracker = self._tracker, None
        self._leaks = None
        if tracker is not None:
            tracker.__exit__()

    def step(self) -> None:
        """A step of the training has ended: only needed where no torch optimizer steps, so that leaks can be told from the rest."""
        if self._leaks is not None:
            self._looked_at = -1
            self._leaks.step()

    def snapshot(self, label: str) -> Snapshot:
        """What is alive now."""
        tracker = self._tracker or Tracker(self._models, self._optimizers)
        one = Snapshot(str(label), perf_counter() - self._began, tracker.book.usage(), _process())
        self._snapshots.append(one)
        return one

    # -- what was found ----------------------------------------------------------------------------

    def report(self) -> MemoryReport:
        """What was measured so far. Ask while the function that trains still runs: leaks are named by its variables."""
        self._look_for_leaks()
        tracker = self._tracker or self._measured
        if tracker is None:
            if not self._snapshots:
                raise SondeError("nothing was measured. Call start() before the training, or snapshot(label) where it matters.")
            return self._of_snapshots()
        return report_of(tracker, snapshots=tuple(self._snapshots), kept=self._kept, base=self._base)

    def _of_snapshots(self) -> MemoryReport:
        devices: dict[str, DeviceMemory] = {}
        for one in self._snapshots:
            for device, usage in one.usage.items():
                known = devices.get(device)
                peak = Peak(usage, one.time_s)
                if known is not None and known.peak.usage.total >= usage.total:
                    peak = known.peak
                devices[device] = DeviceMemory(device, peak, usage)
        note = "only snapshots were taken: what was alive between them, and activations that graphs hold, are not known"
        limit = process_memory.limit()
        return MemoryReport(
            devices, tuple(self._snapshots), process=_process(), peak_rss=process_memory.peak_rss(),
            limit=limit.num_bytes if limit else None, limit_by=limit.by if limit else "", notes=(note,),
        )  # fmt: skip

    def _look_for_leaks(self) -> None:
        steps = self._tracker.num_steps if self._tracker is not None else 0
        if self._leaks is not None and steps != self._looked_at:  # asking takes a second, and nothing has changed since
            self._looked_at = steps
            self._kept = tuple(
                Kept(one.holder, one.num_bytes, one.num_tensors, one.num_nodes, one.per_step_bytes, one.cause, one.fix)
                for one in self._leaks.leaks()
            )

    def forecast(
        self,
        model: nn.Module | None = None,
        inputs: Any = None,
        *,
        batch_size: int | None = None,
        sequence_length: int | None = None,
        loss: Callable[[Any], Any] | None = None,
        optimizer: Optimizer | None = None,
        check: bool = True,
    ) -> Forecast:
        """The peak of a training step at another batch size or sequence length, without taking that memory.

        `inputs` is what forward takes (a tensor, a tuple of arguments, a dict of keyword arguments) at any size that you have; their first
        dimension is the batch, their second the sequence. `loss` makes the loss of the model's output; without it the sum is taken.
        `check` runs a copy of the model for real at a quarter of the size, to say how far fake tensors are from the truth.
        """
        if model is None:
            model = next(iter(self._models.values()), None)
        if optimizer is None and model is next(iter(self._models.values()), None):
            optimizer = next(iter(self._optimizers), None)
        if not isinstance(model, nn.Module) or inputs is None:
            raise SondeError("a forecast needs a model and its inputs: profiler.forecast(model, inputs, batch_size=256)")
        measured = None
        if self._measured is not None and loss is None:
            peak = max((one.peak() for one in self._measured.book.accounts.values()), key=lambda one: one.usage.total, default=None)
            measured = Measured(peak.usage.total, self._measured.batch_size) if peak is not None else None
        with self._deaf():
            return forecast(
                model, inputs, batch_size=batch_size, sequence_length=sequence_length, loss=loss, optimizer=optimizer, measured=measured,
                check=check,
            )  # fmt: skip

    @contextmanager
    def _deaf(self) -> Iterator[None]:
        """What is run inside is no part of what is measured."""
        tracker = self._tracker
        if tracker is not None:
            tracker.is_deaf = True
        try:
            yield
        finally:
            if tracker is not None:
                tracker.is_deaf = False


@dataclass(frozen=True, slots=True)
class Base:
    """The process when the measuring began: what it took beside tensors."""

    rss: int | None = None
    outside: Mapping[str, int] = field(default_factory=dict)  # by device, what its allocator counted beyond them

    @classmethod
    def of(cls, tracker: Tracker) -> Base:
        tensors = {device: usage.total for device, usage in tracker.book.usage().items()}
        counted = {device: _allocator(device)[0] for device in {*tensors, "cpu"}}
        outside = {device: num - tensors.get(device, 0) for device, num in counted.items() if num is not None}
        return cls(process_memory.rss(), outside)


def report_of(
    tracker: Tracker,
    *,
    snapshots: tuple[Snapshot, ...] = (),
    kept: tuple[Kept, ...] = (),
    base: Base | None = None,
    notes: tuple[str, ...] = (),
) -> MemoryReport:
    """What a tracker has seen so far."""
    now = tracker.book.usage()
    limit = process_memory.limit()
    devices = {}
    for device, account in tracker.book.accounts.items():
        allocated, reserved = (None, None) if tracker.is_fake else _allocator(device)
        outside = base.outside.get(device) if base is not None else None
        devices[device] = DeviceMemory(
            device, account.peak(), now.get(device, Usage()), account.timeline(), account.batch_most, account.batch_rest,
            allocated, reserved, outside,
        )  # fmt: skip
    return MemoryReport(
        devices, snapshots, kept, _process(), base.rss if base is not None else None, process_memory.peak_rss(),
        limit.num_bytes if limit else None, limit.by if limit else "", tracker.num_steps, tracker.batch_size, tracker.is_fake,
        (*tracker.notes, *notes),
    )  # fmt: skip


def _process() -> Process:
    found = process_memory.heap()
    return Process(process_memory.rss(), *(found if found is not None else (None, None)))


def _allocator(device: str) -> tuple[int | None, int | None]:
    """What the allocator of a device counts: handed out, and held for that. torch keeps no count on the CPU, malloc does."""
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    if device == "cpu":
        found = process_memory.heap()
        return found if found is not None else (None, None)
    return None, None

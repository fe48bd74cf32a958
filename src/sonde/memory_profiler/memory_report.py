"""The memory of a training as values: what is alive at a moment, the peak, the way there, and what the peak would be elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sonde.errors import SondeError

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "other")
"""`parameters` are those of models, with their buffers. `gradients` are those of parameters and, while backward runs, of activations.
`optimizer state` is what an optimizer keeps and, while it steps, what it works with. `activations` is what the forward made."""

GB = 1e9  # bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes that are alive at one moment: by category, and within it by the path of the module ("" where it belongs to none)."""

    by_place: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.by_category().values())

    def by_category(self) -> dict[str, int]:
        """Every category, also those that are empty."""
        return {category: sum(self.by_place.get(category, {}).values()) for category in CATEGORIES}

    def by_module(self) -> dict[str, dict[str, int]]:
        """By module what it takes in each category, the largest first."""
        modules: dict[str, dict[str, int]] = {}
        for category, places in self.by_place.items():
            for path, num_bytes in places.items():
                if num_bytes:
                    modules.setdefault(path, {})[category] = num_bytes
        return dict(sorted(modules.items(), key=lambda one: (-sum(one[1].values()), one[0])))


@dataclass(frozen=True, slots=True)
class Process:
    """The memory of the whole process; None where the system does not say."""

    rss: int | None = None  # in physical memory
    heap_used: int | None = None  # by malloc's own count, handed out and not given back
    heap_held: int | None = None  # taken from the system for that


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A moment that the user asked for."""

    label: str
    time_s: float
    usage: Mapping[str, Usage]  # by device
    process: Process


@dataclass(frozen=True, slots=True)
class Point:
    """A moment of the timeline: bytes by category, in the order of CATEGORIES."""

    time_s: float
    values: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.values)


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment at which most was alive."""

    usage: Usage
    time_s: float = 0.0
    phase: str = ""  # forward | backward | optimizer | "" outside of these
    module: str = ""  # that was under way
    operation: str = ""  # that asked for the last of it: aten.addmm
    source: str = ""  # train.py:41
    batch_bytes: int = 0  # of the total, what grows with the batch


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device: the peak of its tensors, the way there, and what its allocator says."""

    device: str
    peak: Peak
    now: Usage  # when the report was made
    timeline: tuple[Point, ...] = ()
    batch_most: int = 0  # the most that grows with the batch, at the moment when that was most
    batch_rest: int = 0  # and what else was alive then
    allocated: int | None = None  # by the allocator's own count (on the CPU: malloc's), when the report was made
    reserved: int | None = None  # what it holds of the device (on the CPU: of the system) for that
    outside: int | None = None  # of what was allocated when the measuring began, what belonged to no tensor: the program itself

    @property
    def fragmentation(self) -> float | None:
        """Share of what the allocator holds that nobody uses: free blocks between those in use. None where the allocator does not say."""
        if self.allocated is None or not self.reserved:
            return None
        return max(0.0, 1 - self.allocated / self.reserved)

    @property
    def unaccounted(self) -> int | None:
        """What the allocator counts beyond the tensors that are alive and the program itself. None where it does not say."""
        return None if self.allocated is None or self.outside is None else self.allocated - self.outside - self.now.total


@dataclass(frozen=True, slots=True)
class Kept:
    """Tensors that pile up, and who holds them."""

    holder: str
    num_bytes: int
    num_tensors: int
    num_nodes: int  # of autograd graphs
    per_step_bytes: float
    cause: str
    fix: str

    def __str__(self) -> str:
        return f"{self.cause} {self.fix}"


@dataclass(frozen=True, slots=True)
class Forecast:
    """The peak at another size."""

    peak_bytes: int
    what: str  # batch size | sequence length
    size: int
    measured_size: int
    measured_bytes: int  # the peak at the size that was given or seen
    how: str  # a sentence: how it is known
    error_share: float | None = None  # how far the same method is from what was measured; None where nothing was measured to compare with
    usage: Usage = field(default_factory=Usage)

    def peak_gb(self) -> float:
        return self.peak_bytes / GB

    def __str__(self) -> str:
        from sonde.formatting import size

        error = f", within {self.error_share:.1%} of what was measured" if self.error_share is not None else ""
        return f"{self.what} {self.size}: {size(self.peak_bytes)} ({self.measured_size}: {size(self.measured_bytes)}); {self.how}{error}"


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What a training's memory was taken by."""

    devices: Mapping[str, DeviceMemory]
    snapshots: tuple[Snapshot, ...] = ()
    kept: tuple[Kept, ...] = ()
    process: Process = field(default_factory=Process)
    base_rss: int | None = None  # of the process when the measuring began
    peak_rss: int | None = None  # highest since the process began
    limit: int | None = None  # memory that this process may use
    limit_by: str = ""  # what sets it: the machine, a container, ulimit
    num_steps: int = 0  # of optimizers, while it was measured
    batch_size: int = 0  # of the first forward; 0: none was seen
    is_fake: bool = False  # nothing was computed: fake tensors stood in for the real ones
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """The one that matters: the fullest accelerator, or the CPU."""
        names = [name for name in self.devices if not name.startswith("cpu")] or list(self.devices)
        return max(names, key=lambda name: self.devices[name].peak.usage.total, default="cpu")

    def on(self, device: str | None = None) -> DeviceMemory:
        """What is known of a device, of the one that matters where none is named."""
        name = device if device is not None else self.device
        if name not in self.devices:
            if device is None:
                return DeviceMemory(name, Peak(Usage()), Usage())
            raise SondeError(f"no memory was seen on {device!r}.\nThere is: {', '.join(self.devices) or 'none at all'}")
        return self.devices[name]

    def peak_gb(self, device: str | None = None) -> float:
        """The most that tensors took at a time, in 10^9 bytes."""
        return self.on(device).peak.usage.total / GB

    def by_category(self, device: str | None = None) -> dict[str, int]:
        """Bytes of each category at the peak."""
        return self.on(device).peak.usage.by_category()

    def by_module(self, device: str | None = None) -> dict[str, dict[str, int]]:
        """Bytes of each module at the peak, by category; the largest first."""
        return self.on(device).peak.usage.by_module()

    def timeline(self, device: str | None = None) -> tuple[Point, ...]:
        return self.on(device).timeline

    def leaks(self) -> list[Kept]:
        """What has piled up with every step, the largest first, and who holds it."""
        return list(self.kept)

    def forecast(self, batch_size: int, device: str | None = None) -> Forecast:
        """The peak at another batch size, from this one measurement: what grows with the batch grows in proportion, the rest stays.

        `MemoryProfiler.forecast` measures at the other size instead, where the model can be had.
        """
        if not self.batch_size:
            raise SondeError("no model was called while memory was measured, so the batch size is not known.")
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise SondeError(f"a batch size is a whole number from 1 on, not {batch_size!r}.")
        there = self.on(device)
        total, times = there.peak.usage.total, batch_size / self.batch_size
        # At the peak little may grow with the batch (an optimizer's step), and another moment is the peak of a larger one.
        other = round(max(total - there.peak.batch_bytes * (1 - times), there.batch_rest + there.batch_most * times))
        how = "in proportion to the leading dimension of the model's input"
        return Forecast(other, "batch size", batch_size, self.batch_size, total, how)

    def largest_batch(self, limit: int | None = None) -> int | None:
        """About the largest batch that fits into the memory of this machine, or into `limit` bytes; None where that cannot be told."""
        there, room = self.on(), self.room if limit is None else limit
        if room is None or not self.batch_size or not there.batch_most:
            return None
        fixed = there.peak.usage.total - there.peak.batch_bytes
        moments = [(there.batch_rest, there.batch_most), (fixed, there.peak.batch_bytes)]
        times = [(room - rest) / most if most else (0.0 if rest > room else float("inf")) for rest, most in moments]
        return max(0, int(min(times) * self.batch_size))

    @property
    def room(self) -> int | None:
        """What the limit leaves to tensors: the program itself takes memory too."""
        return None if self.limit is None else max(0, self.limit - (self.base_rss or 0))

    def fits(self) -> bool | None:
        """Whether the peak fits into the memory of this machine; None where its size is not known."""
        return None if self.room is None else self.on().peak.usage.total <= self.room

    def to_dict(self) -> dict[str, Any]:
        from sonde.memory_profiler.memory_report_file import to_dict

        return to_dict(self)

    def summary(self) -> str:
        """A table for people."""
        from sonde.views.memory_text import memory_text

        return memory_text(self)

    __str__ = summary

    def _repr_html_(self) -> str:
        from sonde.views.memory_text import memory_html

        return memory_html(self)

    def plot(self, device: str | None = None) -> Any:
        """The timeline as a picture, to look at or to save."""
        from sonde.views.plots.memory import memory_plot

        return memory_plot(self, device)

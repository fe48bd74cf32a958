"""The memory of a training as values: live bytes, the peak, the timeline, and forecasts for other sizes; as strict JSON and back."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from sonde import formatting
from sonde.errors import SondeError

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "other")
"""`parameters`: of models, including buffers. `gradients`: of parameters and, during the backward, of activations. `optimizer state`:
including temporary tensors of an optimizer step. `activations`: tensors that the forward created."""

GB = 1e9  # bytes
FORMAT = "sonde-memory"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Usage:
    """Live bytes at one moment, by category and then by the path of the module ("" if they belong to none)."""

    by_place: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.by_category().values())

    def by_category(self) -> dict[str, int]:
        """Bytes of every category, including empty ones."""
        return {category: sum(self.by_place.get(category, {}).values()) for category in CATEGORIES}

    def by_module(self) -> dict[str, dict[str, int]]:
        """Bytes of each module by category, the largest module first."""
        modules: dict[str, dict[str, int]] = {}
        for category, paths in self.by_place.items():
            for path, num_bytes in paths.items():
                if num_bytes:
                    modules.setdefault(path, {})[category] = num_bytes
        return dict(sorted(modules.items(), key=lambda one: (-sum(one[1].values()), one[0])))


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The memory of the whole process; None if the system does not report it."""

    rss: int | None = None  # physical memory
    heap_used: int | None = None  # allocated and not freed, as counted by malloc
    heap_held: int | None = None  # taken from the system by malloc


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The memory at a moment chosen by the user."""

    label: str
    time_s: float
    usage: Mapping[str, Usage]  # by device
    process: ProcessMemory


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """One moment of the timeline: bytes by category, in the order of CATEGORIES."""

    time_s: float
    values: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.values)


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment with the most live bytes."""

    usage: Usage
    time_s: float = 0.0
    phase: str = ""  # forward | backward | optimizer | "" outside of these
    module: str = ""  # that was running
    operation: str = ""  # that made the last allocation: aten.addmm
    source: str = ""  # train.py:41
    batch_bytes: int = 0  # part of the total that grows with the batch


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device: peak, current use and timeline of its tensors, and the counts of its allocator."""

    device: str
    peak: Peak
    now: Usage  # when the report was made
    timeline: tuple[TimelinePoint, ...] = ()
    batch_most: int = 0  # highest number of bytes that grow with the batch
    batch_rest: int = 0  # other live bytes at that moment
    allocated: int | None = None  # as counted by the allocator (on the CPU: malloc), when the report was made
    reserved: int | None = None  # taken by the allocator from the device (on the CPU: from the system)
    outside: int | None = None  # allocated at the start of the measurement, but by no tensor: the program itself

    @property
    def fragmentation(self) -> float | None:
        """Unused share of the reserved memory: free blocks between used ones. None if the allocator does not report it."""
        if self.allocated is None or not self.reserved:
            return None
        return max(0.0, 1 - self.allocated / self.reserved)

    @property
    def unaccounted(self) -> int | None:
        """Allocated bytes that belong neither to live tensors nor to the program itself. None if the allocator does not report them."""
        return None if self.allocated is None or self.outside is None else self.allocated - self.outside - self.now.total


@dataclass(frozen=True, slots=True)
class AccumulatedTensors:
    """Tensors whose number grows with every step, and the variable that holds them."""

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
class MemoryForecast:
    """The predicted peak at another batch size or sequence length."""

    peak_bytes: int
    what: str  # batch size | sequence length
    size: int
    measured_size: int
    measured_bytes: int  # peak at `measured_size`
    how: str  # the method, as a phrase
    error_share: float | None = None  # error of the method at a size that was measured; None if none was measured
    usage: Usage = field(default_factory=Usage)

    def peak_gb(self) -> float:
        return self.peak_bytes / GB

    def __str__(self) -> str:
        error = f", within {self.error_share:.1%} of what was measured" if self.error_share is not None else ""
        peak, measured = formatting.size(self.peak_bytes), formatting.size(self.measured_bytes)
        return f"{self.what} {self.size}: {peak} ({self.measured_size}: {measured}); {self.how}{error}"


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What used the memory of a training."""

    devices: Mapping[str, DeviceMemory]
    snapshots: tuple[Snapshot, ...] = ()
    kept: tuple[AccumulatedTensors, ...] = ()  # see `leaks`
    process: ProcessMemory = field(default_factory=ProcessMemory)
    base_rss: int | None = None  # of the process at the start of the measurement
    peak_rss: int | None = None  # highest since the start of the process
    limit: int | None = None  # bytes that this process may use
    limit_by: str = ""  # origin of the limit: the machine, a container, ulimit
    num_steps: int = 0  # optimizer steps during the measurement
    batch_size: int = 0  # of the first forward; 0: no model was called
    is_fake: bool = False  # measured with fake tensors; nothing was computed
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """The name of the most used accelerator, or the CPU if there is none."""
        names = [name for name in self.devices if not name.startswith("cpu")] or list(self.devices)
        return max(names, key=lambda name: self.devices[name].peak.usage.total, default="cpu")

    def on(self, device: str | None = None) -> DeviceMemory:
        """The memory of a device; by default of `self.device`."""
        name = device if device is not None else self.device
        if name not in self.devices:
            if device is None:
                return DeviceMemory(name, Peak(Usage()), Usage())
            raise SondeError(f"no memory was used on {device!r}.\nUsed devices: {', '.join(self.devices) or 'none'}")
        return self.devices[name]

    def peak_gb(self, device: str | None = None) -> float:
        """Peak memory of tensors, in 10^9 bytes."""
        return self.on(device).peak.usage.total / GB

    def by_category(self, device: str | None = None) -> dict[str, int]:
        """Bytes of each category at the peak."""
        return self.on(device).peak.usage.by_category()

    def by_module(self, device: str | None = None) -> dict[str, dict[str, int]]:
        """Bytes of each module at the peak, by category; the largest first."""
        return self.on(device).peak.usage.by_module()

    def timeline(self, device: str | None = None) -> tuple[TimelinePoint, ...]:
        return self.on(device).timeline

    def leaks(self) -> list[AccumulatedTensors]:
        """Tensors that accumulate with every step and the variables that hold them, the largest first."""
        return list(self.kept)

    def forecast(self, batch_size: int, device: str | None = None) -> MemoryForecast:
        """The peak at another batch size, by scaling the bytes that grow with the batch. `MemoryProfiler.forecast` is more accurate, but
        needs the model."""
        if not self.batch_size:
            raise SondeError("no model was called during the measurement, so the batch size is not known.")
        check_size("batch size", batch_size)
        memory = self.on(device)
        total, scale = memory.peak.usage.total, batch_size / self.batch_size
        # The peak may be a moment that hardly grows with the batch (an optimizer step): then another moment is the peak of a larger batch.
        peak = round(max(total - memory.peak.batch_bytes * (1 - scale), memory.batch_rest + memory.batch_most * scale))
        how = "in proportion to the first dimension of the model's input"
        return MemoryForecast(peak, "batch size", batch_size, self.batch_size, total, how)

    def largest_batch(self, limit: int | None = None) -> int | None:
        """An estimate of the largest batch that fits into the memory of this machine, or into `limit` bytes; None if it is not known."""
        memory, available = self.on(), self.room if limit is None else limit
        if available is None or not self.batch_size or not memory.batch_most:
            return None
        fixed = memory.peak.usage.total - memory.peak.batch_bytes
        moments = [(memory.batch_rest, memory.batch_most), (fixed, memory.peak.batch_bytes)]
        scales = [(available - rest) / most if most else (0.0 if rest > available else float("inf")) for rest, most in moments]
        return max(0, int(min(scales) * self.batch_size))

    @property
    def room(self) -> int | None:
        """Bytes available for tensors: the limit without the memory of the program itself. None if the limit is not known."""
        return None if self.limit is None else max(0, self.limit - (self.base_rss or 0))

    def fits(self) -> bool | None:
        """Whether the peak fits into the memory of this machine; None if its size is not known."""
        return None if self.room is None else self.on().peak.usage.total <= self.room

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON; `from_dict` reads it. Totals and shares are included for readers without Sonde."""
        data = {"format": FORMAT, "schema": SCHEMA, **_to_dict(self), "peak_gb": self.peak_gb(), "fits": self.fits()}
        document: dict[str, Any] = formatting.strict(data)
        return document

    def summary(self) -> str:
        """Text for a terminal."""
        from sonde.render.summaries.memory_summary import memory_text

        return memory_text(self)

    __str__ = summary

    def _repr_html_(self) -> str:
        from sonde.render.summaries.memory_summary import memory_html

        return memory_html(self)

    def plot(self, device: str | None = None) -> Any:
        """A plot of the timeline, to show or to save."""
        from sonde.render.plots.memory_plot import memory_plot

        return memory_plot(self, device)


def check_size(what: str, size: Any) -> None:
    """Raises SondeError if a batch size or a sequence length is not a positive integer."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise SondeError(f"a {what} is a whole number, 1 or more, not {size!r}.")


def from_dict(document: Mapping[str, Any]) -> MemoryReport:
    """The report of such a document. Raises SondeError if the document is not a memory report."""
    if document.get("format") != FORMAT:
        raise SondeError(f'this JSON is not a memory report of Sonde: its "format" is {document.get("format")!r}, not {FORMAT!r}.')
    if not isinstance(document.get("schema"), int) or document["schema"] > SCHEMA:
        raise SondeError(
            f"this memory report is of format {document.get('schema')!r}; this version reads up to {SCHEMA}. "
            "Upgrade with: pip install -U sonde"
        )
    try:
        known = {each.name for each in fields(MemoryReport)}
        data = {name: value for name, value in document.items() if name in known}
        data["devices"] = {str(name): _device_from_dict(one) for name, one in data["devices"].items()}
        data["snapshots"] = tuple(_snapshot_from_dict(one) for one in data.get("snapshots", ()))
        data["kept"] = tuple(AccumulatedTensors(**one) for one in data.get("kept", ()))
        data["process"] = ProcessMemory(**data.get("process", {}))
        data["notes"] = tuple(map(str, data.get("notes", ())))
        return MemoryReport(**data)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise SondeError(f"this memory report is damaged and cannot be read: {error}.\nMeasure again to make a new one.") from error


def _to_dict(value: Any) -> Any:
    """A value of this module as dicts and lists, with totals and shares."""
    if isinstance(value, TimelinePoint):
        return [value.time_s, *value.values]
    if isinstance(value, Mapping):
        return {key: _to_dict(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_to_dict(item) for item in value]
    if not is_dataclass(value):
        return value
    data = {each.name: _to_dict(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Usage):
        data["total"] = value.total
    if isinstance(value, DeviceMemory):
        data |= {"categories": CATEGORIES, "fragmentation": value.fragmentation}
    return data


def _usage_from_dict(data: Mapping[str, Any]) -> Usage:
    return Usage({str(c): {str(path): int(num) for path, num in modules.items()} for c, modules in data["by_place"].items()})


def _device_from_dict(data: Mapping[str, Any]) -> DeviceMemory:
    peak = Peak(**{**data["peak"], "usage": _usage_from_dict(data["peak"]["usage"])})
    timeline = tuple(TimelinePoint(float(time_s), tuple(map(int, values))) for time_s, *values in data["timeline"])
    rest = {name: data[name] for name in ("batch_most", "batch_rest", "allocated", "reserved", "outside")}
    return DeviceMemory(str(data["device"]), peak, _usage_from_dict(data["now"]), timeline, **rest)


def _snapshot_from_dict(data: Mapping[str, Any]) -> Snapshot:
    usage = {str(device): _usage_from_dict(one) for device, one in data["usage"].items()}
    return Snapshot(str(data["label"]), float(data["time_s"]), usage, ProcessMemory(**data["process"]))

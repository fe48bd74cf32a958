"""TensorInspector: statistics of tensors by name, comparison, memory, owners and leaks; it stores no tensor, only weak references."""

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from sonde.errors import SondeError, require_count
from sonde.formatting import counted, printable, size, strict_json
from sonde.layer_name_patterns import require_name
from sonde.leaks.accumulated_tensors import Leak, TrackedTensor, find_leaks
from sonde.leaks.find_owners_of_tensor import ReferenceChain, find_owners
from sonde.leaks.leak_detector import MIN_AGE
from sonde.render.plots import Plot
from sonde.render.plots.step_curves import percentiles
from sonde.render.summaries.tables import html_table, text_table
from sonde.statistics.content_hash import content_hash
from sonde.statistics.find_tensors import storage_bytes
from sonde.statistics.private_torch_api import tensor_version
from sonde.tools.tensors.describe_tensor import TensorStats, as_tensor, describe
from sonde.tools.tensors.tensor_comparison import TensorComparison, compare_statistics, compare_values
from sonde.tools.tensors.tensors_of_run import Source, read_last_tensors

MAX_TRACKED = 1000


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Statistics of a tensor at the time of an inspection."""

    id: str  # "loss#3": the name and the number of the inspection
    name: str
    layer: str | None
    operation: str | None
    step: int | None
    stats: TensorStats
    storage_bytes: int  # size of its storage; more than stats.num_bytes if it is a view of a larger tensor
    _ref: Callable[[], Any] = field(repr=False, compare=False)
    _version: int | None = field(repr=False, compare=False)
    _fingerprint: int | None = field(repr=False, compare=False)

    @property
    def is_alive(self) -> bool:
        return self._ref() is not None

    @property
    def value(self) -> Any:
        """The tensor itself if it is alive and unchanged, else None."""
        value = self._ref()
        tensor = as_tensor(value) if value is not None else None
        is_same = tensor is not None and _version(tensor) == self._version and content_hash(tensor) == self._fingerprint
        return value if is_same else None

    def to_json(self) -> str:
        """The statistics as strict JSON; "NaN", "Infinity" and "-Infinity" are strings."""
        stats = {name: getattr(self.stats, name) for name in TensorStats.__dataclass_fields__}
        histogram = self.stats.histogram
        stats["histogram"] = histogram and {"counts": histogram.counts.tolist(), "edges": histogram.edges.tolist()}
        stats["outliers"] = [{"index": one.index, "value": one.value} for one in self.stats.outliers]
        fields = {name: getattr(self, name) for name in ("id", "name", "layer", "operation", "step", "storage_bytes")}
        return strict_json({**fields, "stats": stats})

    def _title(self) -> str:
        stats = self.stats
        place = " ".join(part for part in (self.layer and f"of {self.layer}", self.operation and f"after {self.operation}") if part)
        step = f", step {self.step}" if self.step is not None else ""
        return printable(f"{self.id} {place}".strip() + f"{step}: {stats.dtype} {list(stats.shape)} on {stats.device}")

    def _rows(self) -> list[tuple[str, str]]:
        storage = f", holds {size(self.storage_bytes)} of storage" if self.storage_bytes > self.stats.num_bytes else ""
        return [*self.stats.rows(), *([] if self.stats.unsupported else [("memory", size(self.stats.num_bytes) + storage)])]

    def __str__(self) -> str:
        return self._title() + "\n" + text_table(("", ""), self._rows()).strip("\n")

    def _repr_html_(self) -> str:
        return html_table(("", ""), self._rows(), title=self._title())


@dataclass(frozen=True, slots=True)
class InspectedMemory:
    """Memory of the inspected tensors that are alive. A shared storage counts once in the total and once per name."""

    num_alive: int
    num_bytes: int
    by_name: dict[str, int]

    def __str__(self) -> str:
        rows = sorted(self.by_name.items(), key=lambda one: one[1], reverse=True)
        head = f"{counted(self.num_alive, 'tensor')} alive, {size(self.num_bytes)}"
        return "\n".join([head, *(f"  {printable(name)}: {size(num)}" for name, num in rows)])


class TensorInspector:
    """Measures tensors, arrays and lists; stores the statistics of the last `max_tracked_tensors` inspections, but no tensor."""

    def __init__(self, max_tracked_tensors: int = MAX_TRACKED) -> None:
        self.max_tracked_tensors = require_count(max_tracked_tensors, "max_tracked_tensors")
        self._infos: OrderedDict[str, TensorInfo] = OrderedDict()
        self._num_inspected = 0

    @classmethod
    def from_run(cls, run: Source, max_tracked_tensors: int = MAX_TRACKED) -> Self:
        """The parameters, gradients and outputs of a run as inspections of the last observed step. Without percentiles, L1 norm and
        outliers, which a run does not have."""
        inspector = cls(max_tracked_tensors)
        for number_of, one in zip(range(1, max_tracked_tensors + 1), read_last_tensors(run)):
            stats, site = one.measured.stats, one.site
            described = TensorStats(
                site.shape, site.dtype, "unknown device", stats.num, site.num_bytes, stats.mean, stats.std, stats.min, stats.max,
                stats.l1, stats.l2, stats.zeros, stats.nan, stats.inf,
            )  # fmt: skip
            info = TensorInfo(
                f"{one.name}#{number_of}", one.name, site.module or None, None, one.step, described, described.num_bytes, _ref=lambda: None,
                _version=None, _fingerprint=None,
            )  # fmt: skip
            inspector._infos[info.id] = info
        inspector._num_inspected = len(inspector._infos)
        return inspector

    def inspect_tensor(
        self, tensor: Any, name: str, layer: str | None = None, operation: str | None = None, *, step: int | None = None, bins: int = 64
    ) -> str:
        """Measures a tensor now. Returns an id for `get_tensor_info`, `compare` and `holders`."""
        if not isinstance(name, str) or not name:
            raise SondeError(f'inspect_tensor needs a name such as "loss", not {name!r}.')
        stats = describe(tensor, bins=bins)
        plain = as_tensor(tensor)
        self._num_inspected += 1
        info = TensorInfo(
            f"{name}#{self._num_inspected}", name, layer, operation, step, stats, storage_bytes([plain]) or stats.num_bytes,
            _ref=_weak(tensor), _version=_version(plain), _fingerprint=content_hash(plain),
        )  # fmt: skip
        self._infos[info.id] = info
        while len(self._infos) > self.max_tracked_tensors:
            self._infos.popitem(last=False)
        return info.id

    def get_tensor_info(self, tensor_id: str) -> TensorInfo:
        """The result of one inspection."""
        if isinstance(tensor_id, str) and tensor_id not in self._infos and self._was_dropped(tensor_id):
            advice = f"Store more with TensorInspector(max_tracked_tensors={2 * self.max_tracked_tensors})."
            raise SondeError(f"{tensor_id!r} is no longer stored: only the last {self.max_tracked_tensors:,} inspections are.\n{advice}")
        return self._infos[require_name(tensor_id, self._infos, "inspected tensor")]

    def history(self, name: str) -> list[TensorInfo]:
        """All stored inspections under one name, oldest first."""
        require_name(name, self.names(), "inspected tensor")
        return [info for info in self._infos.values() if info.name == name]

    def names(self) -> list[str]:
        """The names of all stored inspections."""
        return list(dict.fromkeys(info.name for info in self._infos.values()))

    def compare(self, a: Any, b: Any) -> TensorComparison:
        """Compares two tensors. Each is an id, a `TensorInfo`, or a tensor, array or list. Tensors that are alive and unchanged are
        compared by value, others by their statistics; see `basis` and `note` of the result."""
        first, second = self._find_info(a), self._find_info(b)
        values = [info.value if info is not None else argument for info, argument in ((first, a), (second, b))]
        gone = [info for info, value in zip((first, second), values) if info is not None and value is None]
        if not gone:
            return compare_values(*values)
        reasons = " and ".join(f"{info.id} {'was changed since' if info.is_alive else 'is gone'}" for info in gone)
        stats = [info.stats if info is not None else describe(value) for info, value in zip((first, second), values)]
        return compare_statistics(stats[0], stats[1], f"{reasons}.")

    def plot(self, name: str, path: str | Path | None = None) -> Plot:
        """Plots percentiles of one tensor over its inspections, by step if every inspection has one; writes it if there is a path."""
        infos = self.history(name)
        by_step = all(info.step is not None for info in infos)
        steps = [info.step if by_step else at for at, info in enumerate(infos)]
        levels = {level: [info.stats.percentiles.get(level, math.nan) for info in infos] for level in (5, 25, 50, 75, 95)}
        levels |= {0: [info.stats.min for info in infos], 100: [info.stats.max for info in infos]}
        num_bad = [info.stats.num_nan + info.stats.num_inf for info in infos]
        plot = percentiles(steps, levels, name=name, num_bad=num_bad, x_label="step" if by_step else "inspection")
        if path is not None:
            plot.save(path)
        return plot

    def memory(self) -> InspectedMemory:
        """The memory of all inspected tensors that are alive now."""
        alive: dict[int, Tensor] = {}
        by_name: dict[str, list[Tensor]] = {}
        for info in self._infos.values():
            if (value := info._ref()) is not None:
                alive[id(value)] = as_tensor(value)
                by_name.setdefault(info.name, []).append(alive[id(value)])
        bytes_by_name = {name: storage_bytes(tensors) for name, tensors in by_name.items()}
        return InspectedMemory(len(alive), storage_bytes(alive.values()), bytes_by_name)

    def holders(self, tensor: Any, *, max_chains: int = 3) -> list[ReferenceChain]:
        """The reference chains that keep a tensor (or an id) alive, shortest first: `train() local 'history' -> list[412] -> loss`."""
        require_count(max_chains, "max_chains")
        info = self._find_info(tensor)
        value = info._ref() if info is not None else tensor
        if not isinstance(value, Tensor):
            return []  # freed, or a numpy array, which has no chain
        return find_owners(value, name=info.name if info is not None else "", max_chains=max_chains)

    def leaks(self) -> list[Leak]:
        """Finds names under which the tensors of most earlier inspections are still alive, with the owner of these tensors. Needs about ten
        inspections under a name. `sonde.leaks.leak_detector.LeakDetector` checks all tensors, not only inspected ones."""
        found: list[Leak] = []
        for name in self.names():
            infos = self.history(name)
            first: dict[int, TrackedTensor] = {}  # a parameter is the same tensor at every inspection
            for at, info in enumerate(infos):
                tensor = info._ref()
                if isinstance(tensor, Tensor):
                    first.setdefault(id(tensor), TrackedTensor(weakref.ref(tensor), at))
                del tensor
            old = [one for one in first.values() if one.first_step < len(infos) - MIN_AGE]
            found += find_leaks(old, len(infos), name=name)
        return sorted(found, key=lambda leak: leak.num_bytes, reverse=True)

    def clear(self) -> None:
        """Drops all inspections."""
        self._infos.clear()

    def _find_info(self, value: Any) -> TensorInfo | None:
        return value if isinstance(value, TensorInfo) else self.get_tensor_info(value) if isinstance(value, str) else None

    def _was_dropped(self, tensor_id: Any) -> bool:
        count = str(tensor_id).rpartition("#")[2]
        oldest = next(iter(self._infos), "").rpartition("#")[2]
        return bool(oldest) and count.isdecimal() and 0 < int(count) < int(oldest)


def _weak(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # lists and numbers have no weak references
        return lambda: None


def _version(tensor: Tensor) -> int | None:
    try:
        return tensor_version(tensor)
    except Exception:  # inference tensors have no version counter; their content is compared
        return None

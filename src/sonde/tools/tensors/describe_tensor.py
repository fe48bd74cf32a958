"""Statistics of one tensor, array or list: `fast_statistics` in one pass of the native kernel; `describe` adds percentiles and outliers.
Every dtype and layout is accepted; a tensor that cannot be measured gets the reason in `unsupported`."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sonde.errors import SondeError
from sonde.events import STATISTICS
from sonde.formatting import number, percent, size
from sonde.render.plots.arrays_to_plot import percentile, refuse_masked
from sonde.render.plots.histogram_plots import is_steep
from sonde.render.summaries.tables import html_table, text_table
from sonde.render.terminal.sparkline import histogram_line
from sonde.statistics.private_torch_api import sparse_indices, sparse_values
from sonde.statistics.statistics_without_extension import readable, real_part, reason, values_of
from sonde.statistics.tensor_statistics_table import StatisticsTable

Floats = npt.NDArray[np.floating[Any]]

_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")  # as far as this version has them
_EXACT_IN_FLOAT32 = {torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16}
_EXACT_IN_FLOAT32 |= {getattr(torch, name) for name in _FLOAT8 if hasattr(torch, name)}


@dataclass(frozen=True, slots=True)
class FastStatistics:
    """Mean, deviation, extremes, norms and counts of one tensor. Counts are over all elements, the other values over the finite
    ones (for complex tensors: over their absolute values). Without a finite element, `mean`, `std`, `min` and `max` are NaN and the norms
    0. If `unsupported` has a reason, all values are NaN and all counts of zeros, NaN and Inf are 0. `std` is that of numpy."""

    num: int
    mean: float
    std: float
    min: float
    max: float
    l1: float
    l2: float
    zeros: int
    nan: int
    inf: int
    unsupported: str = ""

    @property
    def num_finite(self) -> int:
        return 0 if self.unsupported else self.num - self.nan - self.inf

    @property
    def mean_abs(self) -> float:
        return self.l1 / self.num_finite if self.num_finite else 0.0

    @property
    def max_abs(self) -> float:
        """The largest finite absolute value; NaN if there is none."""
        return max(abs(self.min), abs(self.max))

    @property
    def is_finite(self) -> bool:
        """True if all elements were measured and are finite."""
        return not (self.nan or self.inf or self.unsupported)

    @property
    def zero_share(self) -> float:
        return self.zeros / self.num if self.num else 0.0

    def __str__(self) -> str:
        if self.unsupported:
            return f"not measured: {self.unsupported}"
        bad = f", {self.nan:,} NaN, {self.inf:,} Inf" if self.nan or self.inf else ""
        spread = f"mean {number(self.mean)}, std {number(self.std)}, {number(self.min)} to {number(self.max)}"
        return f"{self.num:,} numbers: {spread}, L2 norm {number(self.l2)}, {percent(self.zero_share)} zeros{bad}"


def as_tensor(value: Any) -> Tensor:
    """The value as a detached tensor; a tensor or an array is not copied."""
    if isinstance(value, Tensor):
        try:
            return value.detach()
        except Exception:  # a subclass without detach; the later read reports why it cannot be read
            return value
    refuse_masked(value, "This array cannot be measured")
    if isinstance(value, (bool, int, float, complex, list, tuple, np.ndarray, np.generic)):
        try:
            array = np.asarray(value)
            if array.dtype.kind not in "biufc":
                raise TypeError(f"elements of type {array.dtype}")
            return _from_numpy(array)
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # ragged lists, tensors within lists
            return _from_list(value, error)
    kinds, advice = "torch tensors, numpy arrays, numbers and lists of numbers", _tensor_inside(value)
    what = "None" if value is None else f"A {type(value).__name__}"
    raise SondeError(f"{what} is not a tensor: Sonde measures {kinds}." + (f"\n{advice}" if advice else ""))


def _tensor_inside(value: Any) -> str:
    """What to pass instead of an object that is no tensor."""
    if value is None:
        return "A gradient is None before backward(), and if the loss does not depend on its parameter: check `is not None` first."
    members = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    name = next((name for name, member in members.items() if isinstance(member, (Tensor, np.ndarray))), None)
    if name is None:
        return ""
    return f"Pass a part of it: value[{name!r}]" if isinstance(value, Mapping) else f"Pass a part of it: value.{name}"


def _from_numpy(array: npt.NDArray[Any]) -> Tensor:
    if not array.dtype.isnative or array.dtype.itemsize > 16 or array.dtype == np.longdouble:
        array = array.astype({"c": np.complex128, "f": np.float64}.get(array.dtype.kind, array.dtype.newbyteorder("=")))
    if not array.flags.writeable or any(step < 0 for step in array.strides):
        array = array.copy()  # torch has no read-only tensors and no negative strides
    return torch.from_numpy(array)


def _from_list(value: Any, error: Exception) -> Tensor:
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, Tensor) for item in value):
        try:
            return torch.stack([item.detach() for item in value])
        except Exception as unequal:
            error = unequal
    advice = "Pass numbers only, in rows of equal length, or inspect its parts one by one."
    raise SondeError(f"This {type(value).__name__} cannot be converted to a tensor: {reason(error)}.\n{advice}") from None


@torch.no_grad()
def fast_statistics(value: Any) -> FastStatistics:
    """Measures one tensor, array or list. A tensor on a device is synchronized."""
    tensor = as_tensor(value)
    table = StatisticsTable(1)
    table.measure_one(0, tensor)
    table.synchronize()
    if 0 in table.unsupported:
        return _unsupported(tensor, table.unsupported[0])
    row = dict(zip(STATISTICS, table.values[0].tolist()))
    num, zeros, nan, inf = (int(row[name]) for name in ("num", "zeros", "nan", "inf"))
    mean, std, low, high, l2 = (row[name] for name in ("mean", "std", "min", "max", "l2"))
    num_finite = num - nan - inf
    if not num_finite:
        mean = std = low = high = math.nan
        l1 = l2 = 0.0
    elif low >= 0 or high <= 0:
        l1 = abs(mean) * num_finite  # all of one sign, so the mean gives the sum of magnitudes
    else:
        try:
            l1 = _sum_of_magnitudes(tensor, is_finite=num_finite == num)
        except Exception as error:
            return _unsupported(tensor, reason(error))
    return FastStatistics(num, mean, std, low, high, l1, l2, zeros, nan, inf)


def _unsupported(tensor: Tensor, why: str) -> FastStatistics:
    num, nan = 0, math.nan
    with suppress(Exception):  # a jagged tensor and a lazy parameter have no number
        num = tensor.numel()
    return FastStatistics(num, nan, nan, nan, nan, nan, nan, 0, 0, 0, why)


def _sum_of_magnitudes(tensor: Tensor, *, is_finite: bool) -> float:
    values, _ = values_of(readable(tensor))
    if values.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        values = real_part(values)
    if not is_finite:
        values = values.nan_to_num(0.0, 0.0, 0.0)
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    return float(torch.linalg.vector_norm(values, 1, dtype=wide))


@torch.no_grad()
def elements(value: Any) -> tuple[Floats, int]:
    """Returns all stored elements as one flat numpy array of real numbers, and the number of implicit zeros (of a sparse tensor). Complex
    numbers become their absolute values. The array may share memory with the tensor, so do not write to it."""
    tensor = as_tensor(value)
    try:
        values, num_implicit = values_of(readable(tensor))
        values = values.reshape(-1)
        if values.dtype is not torch.float64:
            values = real_part(values, torch.float32 if values.dtype in _EXACT_IN_FLOAT32 else torch.float64)
        array: Floats = values.resolve_neg().cpu().numpy()
    except Exception as error:
        raise SondeError(f"The elements of this tensor cannot be read: {reason(error)}.") from None
    return array, num_implicit


PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
EXTREME_LOG2 = 3  # extreme: within a factor of 2^3 of the largest number of the dtype, or below its smallest normal number
OUTLIER_IQR = 3.0  # interquartile ranges beyond the quartiles: exceeded by one of 400,000 normal numbers
OUTLIER_STD = 6.0  # standard deviations, used if the interquartile range is 0
MAX_OUTLIERS = 8  # listed with index and value
MAX_BINS = 100_000
_HISTOGRAM_CHUNK = 1 << 20  # elements in float64 at a time


@dataclass(frozen=True, slots=True)
class Outlier:
    """One outlier; `index` is empty for sparse tensors."""

    index: tuple[int, ...]
    value: float

    def __str__(self) -> str:
        return f"{number(self.value)} at {list(self.index)}"


@dataclass(frozen=True, slots=True)
class TensorHistogram:
    """Histogram of the finite elements: `counts[i]` are in [edges[i], edges[i + 1]); the last bin includes its upper edge."""

    counts: npt.NDArray[np.int64]
    edges: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of one tensor at one moment, with the conventions of `FastStatistics`."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    num_elements: int
    num_bytes: int
    mean: float
    std: float
    min: float
    max: float
    l1_norm: float
    l2_norm: float
    num_zeros: int
    num_nan: int
    num_inf: int
    num_extreme: int = 0  # close to the largest number of the dtype, or below the smallest normal one; 0 for integers
    num_outliers: int = 0  # beyond OUTLIER_IQR
    outliers: tuple[Outlier, ...] = ()  # the farthest, at most MAX_OUTLIERS
    percentiles: Mapping[int, float] = field(default_factory=dict)
    histogram: TensorHistogram | None = None  # None without a finite element
    unsupported: str = ""

    @property
    def sparsity(self) -> float:
        """Share of the elements that are zero."""
        return self.num_zeros / self.num_elements if self.num_elements else 0.0

    @property
    def median(self) -> float:
        return self.percentiles.get(50, math.nan)

    def title(self) -> str:
        """`float32 [8, 3] on cpu, 96 bytes`."""
        return f"{self.dtype} {list(self.shape)} on {self.device}, {size(self.num_bytes)}"

    def rows(self) -> list[tuple[str, str]]:
        """The statistics as texts with their names, for a table."""
        if self.unsupported:
            return [("not measured", self.unsupported)]
        rows = [
            ("mean ± std", f"{number(self.mean)} ± {number(self.std)}"),
            ("min … max", f"{number(self.min)} … {number(self.max)}"),
            ("L1, L2 norm", f"{number(self.l1_norm)}, {number(self.l2_norm)}"),
            ("zeros", f"{self.num_zeros:,} of {self.num_elements:,} ({percent(self.sparsity)})"),
            ("NaN, Inf", f"{self.num_nan:,}, {self.num_inf:,}"),
            ("extreme", f"{self.num_extreme:,}"),
        ]
        if self.percentiles:
            rows.append(("percentiles", ", ".join(f"{level}: {number(value)}" for level, value in self.percentiles.items())))
        farthest = ", ".join(f"{number(one.value)} at {list(one.index)}" for one in self.outliers[:3])
        rows.append(("outliers", f"{self.num_outliers:,}" + (f": {farthest}" if farthest else "")))
        if self.histogram is not None:
            counts = self.histogram.counts.astype(np.float64)
            steep = is_steep(counts)
            rows.append(("histogram", f"│{histogram_line(counts.tolist(), logarithmic=steep)}│" + (" (log)" if steep else "")))
        return rows

    def __str__(self) -> str:
        return self.title() + "\n" + text_table(("", ""), self.rows()).strip("\n")

    def _repr_html_(self) -> str:
        return html_table(("", ""), self.rows(), title=self.title())


@torch.no_grad()
def describe(value: Any, *, bins: int = 64) -> TensorStats:
    """Full statistics of a tensor, array or list. Needs about twice its memory on the host; a tensor on a device is copied."""
    if isinstance(bins, bool) or not isinstance(bins, int) or not 1 <= bins <= MAX_BINS:
        raise SondeError(f"A histogram cannot have bins={bins!r}: pass a whole number from 1 to {MAX_BINS:,}, for instance bins=64.")
    tensor = as_tensor(value)
    found = fast_statistics(tensor)
    simple = TensorStats(
        shape_of(tensor), str(tensor.dtype).removeprefix("torch."), str(tensor.device), found.num, num_bytes(tensor), found.mean, found.std,
        found.min, found.max, found.l1, found.l2, found.zeros, found.nan, found.inf, unsupported=found.unsupported,
    )  # fmt: skip
    if not found.num_finite:
        return simple
    stored, num_implicit = elements(tensor)
    finite = stored if found.is_finite else stored[np.isfinite(stored)]
    ordered = np.sort(finite)
    percentiles = {percent: percentile(ordered, percent, num_implicit) for percent in PERCENTILES}
    low, high = _outlier_bounds(ordered, found, percentiles)
    # Outliers are at both ends of the sorted elements. Implicit zeros are outliers only if a bound excludes zero.
    num_below = int(np.searchsorted(ordered, low, "left")) + (num_implicit if low > 0 else 0)
    num_above = ordered.size - int(np.searchsorted(ordered, high, "right")) + (num_implicit if high < 0 else 0)
    return replace(
        simple, num_extreme=_num_extreme(ordered, tensor.dtype), num_outliers=num_below + num_above,
        outliers=_outliers(stored, low, high, found, tensor), percentiles=percentiles, histogram=histogram(ordered, num_implicit, bins),
    )  # fmt: skip


def num_bytes(tensor: Tensor) -> int:
    """Bytes of its elements; 0 without memory. A view may keep a larger storage alive: see `TensorInspector.memory`."""
    try:
        parts = [tensor]
        if tensor.layout is torch.sparse_coo:
            parts = [sparse_indices(tensor), sparse_values(tensor)]
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        elif tensor.layout is not torch.strided:
            parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        return 0 if tensor.is_meta else sum(part.numel() * part.element_size() for part in parts)
    except Exception:  # jagged, lazy or a subclass: unknown
        return 0


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in tensor.shape)
    except Exception:  # the sizes of a jagged tensor are symbolic
        return ()


def histogram(ordered: Floats, num_implicit: int, bins: int) -> TensorHistogram:
    """Histogram of sorted finite elements plus `num_implicit` zeros, in bins of equal width."""
    ends = [*ordered[:1].tolist(), *ordered[-1:].tolist(), *([0.0] if num_implicit else [])]
    low, high = min(ends), max(ends)
    if low == high:
        half_width = abs(low) / 2 or 0.5
        low, high = low - half_width, high + half_width
    # Scaled to about 1 by a power of two, which is exact: huge differences overflow, and numpy rejects tiny ones.
    exponent = math.frexp(max(abs(low), abs(high)))[1]
    shift = exponent if abs(exponent) > 500 else 0
    low, high = math.ldexp(low, -shift), math.ldexp(high, -shift)
    edges = np.linspace(low, high, bins + 1)
    while bins > 1 and not (np.diff(edges) > 0).all():  # neighboring float64 numbers: too close for so many bins
        bins //= 2
        edges = np.linspace(low, high, bins + 1)
    counts = np.zeros(bins, dtype=np.int64)
    for start in range(0, ordered.size, _HISTOGRAM_CHUNK):
        part = ordered[start : start + _HISTOGRAM_CHUNK].astype(np.float64)
        counts += np.histogram(np.ldexp(part, -shift) if shift else part, edges)[0]
    if num_implicit:
        counts += num_implicit * np.histogram([0.0], edges)[0]
    return TensorHistogram(counts, np.ldexp(edges, shift))


def _outlier_bounds(ordered: Floats, found: FastStatistics, percentiles: Mapping[int, float]) -> tuple[float, float]:
    first, third = percentiles[25], percentiles[75]
    common = (first, third) if first == third else ()
    if common:  # at least half of the elements are equal, as after a ReLU: the bounds come from the others
        others = ordered[ordered != first]
        if others.size:
            first, third = percentile(others, 25), percentile(others, 75)
    distance = OUTLIER_IQR * (third - first)
    if distance > 0:
        return min((first - distance, *common)), max((third + distance, *common))
    return found.mean - OUTLIER_STD * found.std, found.mean + OUTLIER_STD * found.std


def _num_extreme(ordered: Floats, dtype: torch.dtype) -> int:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0
    limits = torch.finfo(dtype)
    large, small = limits.max / 2**EXTREME_LOG2, limits.smallest_normal
    outside = ordered.size - np.searchsorted(ordered, large, "left") + np.searchsorted(ordered, -large, "right")
    inside = np.searchsorted(ordered, small, "left") - np.searchsorted(ordered, -small, "right")
    zeros = np.searchsorted(ordered, 0.0, "right") - np.searchsorted(ordered, 0.0, "left")
    return int(outside + inside - zeros)


def _outliers(stored: Floats, low: float, high: float, found: FastStatistics, tensor: Tensor) -> tuple[Outlier, ...]:
    if found.min >= low and found.max <= high:
        return ()
    (where,) = np.nonzero(np.isfinite(stored) & ((stored < low) | (stored > high)))
    beyond = np.maximum(low - stored[where].astype(np.float64), stored[where] - high)
    farthest = where[np.argsort(-beyond, kind="stable")[:MAX_OUTLIERS]]
    shape = tuple(tensor.shape) if tensor.layout is torch.strided else ()
    indices = (tuple(map(int, np.unravel_index(at, shape))) if shape else () for at in farthest.tolist())
    return tuple(Outlier(index, value) for index, value in zip(indices, stored[farthest].tolist()))

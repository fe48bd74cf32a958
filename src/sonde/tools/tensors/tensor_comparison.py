"""Compares two tensors element by element, or by their stored statistics if the values are gone."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sonde.errors import SondeError
from sonde.formatting import counted, number
from sonde.render.summaries.tables import html_table, text_table
from sonde.statistics.statistics_without_extension import readable, reason
from sonde.tools.tensors.describe_tensor import Floats, TensorHistogram, TensorStats, as_tensor

CHUNK = 1 << 20  # elements in float64 at a time
MAX_DENSE = 1 << 27  # elements of a sparse tensor that may be converted to dense


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """The differences of two tensors, over the pairs in which both numbers are finite. A pair is different unless its numbers are equal or
    both NaN. The relative difference is |a - b| / max(|a|, |b|). `distribution_distance` is the earth mover's distance (Wasserstein-1);
    from statistics it is correct to about the width of a bin. Values that could not be computed are NaN or None."""

    basis: str  # "values": elements were compared; "statistics": only histograms
    note: str = ""  # why elements were not compared
    max_abs_difference: float = math.nan
    max_rel_difference: float = math.nan
    cosine: float = math.nan
    distribution_distance: float = math.nan
    num_different: int | None = None
    num_pairs: int = 0
    num_bad_pairs: int = 0  # at least one of the two is not finite
    first_difference: tuple[int, ...] | None = None
    first_values: tuple[complex, complex] | None = None  # the two numbers there

    @property
    def are_equal(self) -> bool | None:
        """True if all elements are equal; None if that is unknown."""
        return None if self.num_different is None else self.num_different == 0

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("compared by", self.basis), ("earth mover's distance", number(self.distribution_distance))]
        if self.num_different is None:
            return rows
        rows += [
            ("different", f"{self.num_different:,} of {counted(self.num_pairs, 'element')}"),
            ("max |a - b|", number(self.max_abs_difference)),
            ("max relative", number(self.max_rel_difference)),
            ("cosine", f"{self.cosine:.6f}"),
        ]
        if self.first_difference is not None and self.first_values is not None:
            rows.append(("first at", f"{list(self.first_difference)}: {self.first_values[0]} and {self.first_values[1]}"))
        if self.num_bad_pairs:
            rows.append(("not finite", counted(self.num_bad_pairs, "pair")))
        return rows

    def __str__(self) -> str:
        table = text_table(("", ""), self._rows()).strip("\n")
        return f"{table}\n{self.note}" if self.note else table

    def _repr_html_(self) -> str:
        return html_table(("", ""), self._rows(), title="comparison", notes=[self.note] if self.note else [])


def compare_values(first: Any, second: Any) -> TensorComparison:
    """Compares element by element; with different shapes, only the distributions."""
    a, b = _array(as_tensor(first)), _array(as_tensor(second))
    distance = earth_movers(_magnitudes(a), _magnitudes(b))
    if a.shape != b.shape:
        note = f"The shapes {list(a.shape)} and {list(b.shape)} differ, so only the distributions are compared."
        return TensorComparison("values", note, distribution_distance=distance)
    shape, a, b = a.shape, a.reshape(-1), b.reshape(-1)
    most = most_relative = dot = square_a = square_b = 0.0
    num_different, num_bad, first_at = 0, 0, -1
    scale_a, scale_b = _largest(a), _largest(b)
    for start in range(0, a.size, CHUNK):
        x, y = a[start : start + CHUNK], b[start : start + CHUNK]
        different = (x != y) & ~((x != x) & (y != y))
        if first_at < 0 and different.any():
            first_at = start + int(different.argmax())
        num_different += int(np.count_nonzero(different))
        x, y = _wide(x), _wide(y)
        finite = np.isfinite(x) & np.isfinite(y)
        num_bad += int(x.size - np.count_nonzero(finite))
        x, y = x[finite], y[finite]
        if not x.size:
            continue
        size = np.maximum(np.abs(x), np.abs(y))
        with np.errstate(over="ignore", invalid="ignore"):
            most = max(most, float(np.abs(x - y).max()))
            relative = np.abs(x / size - y / size)  # divided first: the difference of two large numbers may overflow
        most_relative = max(most_relative, float(np.nan_to_num(relative).max()))
        x, y = x / scale_a, y / scale_b
        dot += float(np.vdot(x, y).real)
        square_a += float(np.vdot(x, x).real)
        square_b += float(np.vdot(y, y).real)
    compared = a.size > num_bad
    norm = math.sqrt(square_a) * math.sqrt(square_b)
    first_index = tuple(int(i) for i in np.unravel_index(first_at, shape)) if first_at >= 0 else None
    return TensorComparison(
        basis="values", max_abs_difference=most if compared else math.nan, max_rel_difference=most_relative if compared else math.nan,
        cosine=max(-1.0, min(1.0, dot / norm)) if norm else math.nan, distribution_distance=distance, num_different=num_different,
        num_pairs=int(a.size), num_bad_pairs=num_bad, first_difference=first_index,
        first_values=(a[first_at].item(), b[first_at].item()) if first_at >= 0 else None,
    )  # fmt: skip


def compare_statistics(first: TensorStats, second: TensorStats, why: str) -> TensorComparison:
    """Compares the histograms that were stored at the inspections. `why` is the reason why the values are not available."""
    distance = math.nan
    if first.histogram is not None and second.histogram is not None:
        distance = _histogram_distance(first.histogram, second.histogram)
    note = f"{why} Its values cannot be compared any more, so the histograms of the inspections are compared."
    return TensorComparison("statistics", note, distribution_distance=distance)


def earth_movers(a: Floats, b: Floats) -> float:
    """The area between the two distribution functions of the finite elements; NaN if one has none."""
    a, b = (np.sort(x[np.isfinite(x)]).astype(np.float64) for x in (a, b))
    if not a.size or not b.size:
        return math.nan
    scale = max(abs(float(x)) for x in (a[0], a[-1], b[0], b[-1])) or 1.0
    edges = np.concatenate([a, b]) / scale  # scaled: the difference of two large numbers may overflow
    edges.sort()
    share_a = np.searchsorted(a / scale, edges[:-1], "right") / a.size
    share_b = np.searchsorted(b / scale, edges[:-1], "right") / b.size
    return float((np.abs(share_a - share_b) * np.diff(edges)).sum()) * scale


def _histogram_distance(a: TensorHistogram, b: TensorHistogram) -> float:
    edges = np.union1d(a.edges, b.edges)
    share_a, share_b = (np.interp(edges, one.edges, np.concatenate([[0.0], np.cumsum(one.counts)]) / one.counts.sum()) for one in (a, b))
    gap = np.abs(share_a - share_b)
    return float(((gap[:-1] + gap[1:]) / 2 * np.diff(edges)).sum())


@torch.no_grad()
def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """The tensor as a dense numpy array, in a dtype that represents its elements exactly."""
    try:
        plain = readable(tensor)
        if plain.layout is not torch.strided:
            if plain.numel() > MAX_DENSE:
                raise SondeError(f"A sparse tensor of {plain.numel():,} elements is too large to be converted to dense for a comparison.")
            plain = plain.to_dense()
        if plain.is_floating_point() and plain.dtype is not torch.float64:
            plain = plain.to(torch.float32)
        elif plain.dtype is torch.complex32:
            plain = plain.to(torch.complex64)
        array: npt.NDArray[Any] = plain.resolve_conj().resolve_neg().cpu().numpy()
    except SondeError:
        raise
    except Exception as error:
        raise SondeError(f"This tensor cannot be compared: {reason(error)}.") from None
    return array


def _wide(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _magnitudes(x: npt.NDArray[Any]) -> Floats:
    real: Floats = np.abs(x) if x.dtype.kind == "c" else x
    return real.reshape(-1).astype(np.float64) if real.dtype.kind in "biu" else real.reshape(-1)


def _largest(x: npt.NDArray[Any]) -> float:
    sizes = np.abs(_wide(x)) if x.size else np.zeros(1)
    return float(np.max(sizes, where=np.isfinite(sizes), initial=0.0)) or 1.0

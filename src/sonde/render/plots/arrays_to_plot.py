"""Arrays, lists and tensors of any kind as NumPy arrays for plots, without importing torch; counts and ranges of their values."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonde.errors import SondeError
from sonde.formatting import number

Floats = NDArray[np.float64]
NON_FINITE = ("NaN", "Infinity", "-Infinity")


def plain_array(values: Any, what: str = "values") -> NDArray[Any]:
    """`values` as an array of booleans, integers or float64. Complex numbers give their magnitude."""
    refuse_masked(values, what)
    try:
        array = _loaded(values)
    except SondeError:
        raise
    except Exception as error:  # whatever a tensor that has no numbers raises: meta, fake, nested …
        raise SondeError(f"{what} cannot be drawn: {type(values).__name__} gives no numbers ({error}).") from None
    if array.dtype.kind == "c":
        array = np.abs(array)
    if array.dtype.kind == "f":
        return array.astype(np.float64, copy=False)
    if array.dtype.kind not in "bui":
        raise SondeError(
            f"{what} cannot be drawn: {type(values).__name__} does not hold numbers. Give a tensor, an array or a list of numbers."
        )
    return array


def floats(values: Any, what: str = "values") -> Floats:
    """`values` as float64, in the shape that they have."""
    return plain_array(values, what).astype(np.float64, copy=False)


def one_row(values: Any, what: str) -> Floats:
    """A sequence of single numbers."""
    array = floats(values, what)
    if array.ndim > 1 and array.size != max(array.shape):
        raise SondeError(f"{what} must be one number per step, but have the shape {array.shape}. Give their norms.")
    return array.reshape(-1)


def steps_for(steps: Any, num: int, what: str) -> Floats:
    """The steps of `num` values."""
    array = one_row(steps, "steps")
    if array.size != num:
        raise SondeError(f"{what} has {num} values but there are {array.size} steps. Give one value per step.")
    if not np.isfinite(array).all():
        raise SondeError("Steps must be finite: one of them is NaN or infinite.")
    return array


def plain_steps(steps: Floats) -> list[float]:
    """Whole numbers as integers, for JSON."""
    return [int(step) if step.is_integer() else step for step in steps.tolist()]


def two_dimensional(matrix: Any, name: str) -> Floats:
    """A matrix; a row of numbers is a matrix of one row."""
    values = floats(matrix, name)
    if values.ndim > 2:
        raise SondeError(
            f"{name}: a heat map has two dimensions, these values have {values.ndim}: {values.shape}.\nChoose two, for example values[0]."
        )
    return values.reshape(1, -1) if values.ndim < 2 else values


def percentile(ordered: NDArray[np.floating[Any]], percent: float, num_implicit: int = 0) -> float:
    """A percentile of sorted finite elements plus `num_implicit` zeros, by linear interpolation."""
    num_negative = int(np.searchsorted(ordered, 0.0, "left")) if num_implicit else ordered.size

    def at(rank: int) -> float:
        if rank < num_negative:
            return float(ordered[rank])
        return 0.0 if rank < num_negative + num_implicit else float(ordered[rank - num_implicit])

    rank = (ordered.size + num_implicit - 1) * percent / 100
    below, above = at(math.floor(rank)), at(math.ceil(rank))
    share = rank - math.floor(rank)
    return below * (1 - share) + above * share


def refuse_masked(values: Any, what: str) -> None:
    """Raises a `SondeError` for an array with masked elements: without the mask they would count as numbers."""
    if isinstance(values, np.ma.MaskedArray) and (num := int(np.ma.getmaskarray(values).sum())):
        other = "values.compressed() leaves masked elements out, values.filled(float('nan')) marks them as NaN."
        raise SondeError(f"{what}: {num:,} of {values.size:,} elements are masked, and Sonde reads plain arrays.\n{other}")


def coarse(values: Floats, num_rows: int, num_columns: int) -> Floats:
    """Not more cells than can be drawn: neighbors share one, which shows a non-finite value if they have one, else their maximum."""
    for dimension, limit in enumerate((num_rows, num_columns)):
        num = values.shape[dimension]
        if num > limit:
            edges = np.linspace(0, num, limit, endpoint=False).astype(int)
            lowest = np.logical_or.reduceat(values == -np.inf, edges, axis=dimension)
            with np.errstate(invalid="ignore"):
                values = np.maximum.reduceat(values, edges, axis=dimension)  # keeps a NaN, as fmax does not
            values = np.where(lowest & np.isfinite(values), -np.inf, values)
    return values


def non_finite(values: Floats) -> dict[str, int]:
    """How many values are NaN, Infinity or -Infinity; what does not occur is left out."""
    bad = values[~np.isfinite(values)]
    counts = (int(np.isnan(bad).sum()), int((bad == np.inf).sum()), int((bad == -np.inf).sum()))
    return {name: count for name, count in zip(NON_FINITE, counts) if count}


def stretches(flags: Any) -> list[tuple[int, int]]:
    """First and last index of each row of true flags."""
    edges = np.flatnonzero(np.diff(np.r_[False, flags, False].astype(int))).tolist()
    return [(start, end - 1) for start, end in zip(edges[::2], edges[1::2])]


def bad_text(counts: Mapping[str, int]) -> str:
    """`3 NaN, 1 Infinity`."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def place_text(names: Sequence[str], kind: str = "layer") -> str:
    """`in encoder.0`, `in 4 layers, the first of them encoder.0`."""
    return f"in {names[0]}" if len(names) == 1 else f"in {len(names):,} {kind}s, the first of them {names[0]}"


def range_text(finite: Floats) -> str:
    return f"{number(float(finite.min()))} to {number(float(finite.max()))}"


def _loaded(values: Any) -> NDArray[Any]:
    if isinstance(values, Sequence) and not isinstance(values, (str, bytes)):
        # A list of losses is often a list of tensors, on any device, each with its graph.
        return np.asarray([_loaded(value) if hasattr(value, "detach") or isinstance(value, (list, tuple)) else value for value in values])
    if not hasattr(values, "detach") or not hasattr(values, "numpy"):
        return np.asarray(values)
    tensor = values.detach()
    if getattr(tensor, "is_meta", False):
        raise SondeError("A meta tensor cannot be drawn: it has a shape but no values.")
    if getattr(tensor, "is_quantized", False):
        tensor = tensor.dequantize()
    if str(getattr(tensor, "layout", "torch.strided")) != "torch.strided":
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = tensor.abs()
    if tensor.is_floating_point():
        tensor = tensor.double()  # numpy knows no bfloat16 and no float8
    return np.asarray(tensor.numpy(force=True))

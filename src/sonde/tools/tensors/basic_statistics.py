"""Statistics of a tensor, array or list in one pass of the native kernel. All tools measure with it.

Every dtype and layout is accepted and nothing is changed. A tensor that cannot be measured gets the reason in `unsupported`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sonde.errors import SondeError
from sonde.events import STATISTICS
from sonde.statistics.tensor_statistics_table import StatisticsTable
from sonde.statistics.torch_fallback import readable, real_part, reason, values_of

Floats = npt.NDArray[np.floating[Any]]

_EXACT_IN_FLOAT32 = {
    getattr(torch, name)
    for name in (
        "float32", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "uint16",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    )
    if hasattr(torch, name)
}


@dataclass(frozen=True, slots=True)
class FastStatistics:
    """Mean, deviation, extremes, norms and counts of one tensor.

    Counts are over all elements, the other values over the finite ones (for complex tensors: over their absolute values). Without a finite
    element, `mean`, `std`, `min` and `max` are NaN and the norms 0. If `unsupported` has a reason, all values are NaN and all counts of
    zeros, NaN and Inf are 0. `std` divides by the number of elements, as numpy does.
    """

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


def as_tensor(value: Any) -> Tensor:
    """The value as a detached tensor; a tensor or an array is not copied."""
    if isinstance(value, Tensor):
        try:
            return value.detach()
        except Exception:  # a subclass without detach; the later read reports why it cannot be read
            return value
    if isinstance(value, (bool, int, float, complex, list, tuple, np.ndarray, np.generic)):
        try:
            array = np.asarray(value)
            if array.dtype.kind in "biufc":
                return _from_numpy(array)
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # ragged lists, tensors within lists
            return _from_list(value, error)
        return _from_list(value, TypeError(f"elements of type {array.dtype}"))
    raise SondeError(
        f"A {type(value).__name__} is not a tensor: Sonde measures torch tensors, numpy arrays, numbers and lists of numbers.\n"
        "Did you mean one of its attributes, for instance output.logits?"
    )


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
    raise SondeError(
        f"This {type(value).__name__} cannot be converted to a tensor: {reason(error)}.\n"
        "Pass numbers only, in rows of equal length, or inspect its parts one by one."
    ) from None


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
    num_finite = num - nan - inf
    if not num_finite:
        return FastStatistics(num, math.nan, math.nan, math.nan, math.nan, 0.0, 0.0, zeros, nan, inf)
    mean, std, low, high, l2 = (row[name] for name in ("mean", "std", "min", "max", "l2"))
    if low >= 0 or high <= 0:
        l1 = abs(mean) * num_finite  # all of one sign, so the mean gives the sum of magnitudes
    else:
        try:
            l1 = _sum_of_magnitudes(tensor, is_finite=num_finite == num)
        except Exception as error:
            return _unsupported(tensor, reason(error))
    return FastStatistics(num, mean, std, low, high, l1, l2, zeros, nan, inf)


def _unsupported(tensor: Tensor, why: str) -> FastStatistics:
    nan = math.nan
    return FastStatistics(_num_elements(tensor), nan, nan, nan, nan, nan, nan, 0, 0, 0, why)


def _num_elements(tensor: Tensor) -> int:
    try:
        return tensor.numel()
    except Exception:  # a jagged tensor, a lazy parameter
        return 0


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
    """Returns all stored elements as one flat numpy array of real numbers (float32 if that is exact) and the number of implicit zeros.

    Only sparse tensors have implicit zeros. Complex numbers become their absolute values. The array may share memory with the tensor, so
    do not write to it. Raises a `SondeError` if the tensor cannot be read.
    """
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

"""A tensor, array or list in one pass of the kernel: what every tool of the workbench measures with.

Any dtype and any layout is taken and nothing is changed; what cannot be measured says why instead of giving a number.
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
from sonde.statistics.table import StatisticsTable
from sonde.statistics.torch_ops import readable, real_part, reason, values_of

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
class Quick:
    """One pass of the kernel, plus `l1`. Counts are over all elements, the other numbers over the finite ones (of complex numbers:
    over their absolute values).

    Where there is no finite element, `mean`, `std`, `min` and `max` are NaN and the norms 0. Where `unsupported` says why, all of them
    are NaN and nothing was counted. `std` divides by the number of elements, as numpy does.
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
        """The largest finite absolute value; NaN where there is none."""
        return max(abs(self.min), abs(self.max))

    @property
    def is_finite(self) -> bool:
        """Whether all elements are known to be finite."""
        return not (self.nan or self.inf or self.unsupported)

    @property
    def zero_share(self) -> float:
        return self.zeros / self.num if self.num else 0.0


def as_tensor(value: Any) -> Tensor:
    """The value as a detached tensor, without a copy where it is a tensor or an array."""
    if isinstance(value, Tensor):
        try:
            return value.detach()
        except Exception:  # a stranger's class without detach; whoever reads it says why it cannot be read
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
        array = array.copy()  # torch has no read-only and no backward tensors
    return torch.from_numpy(array)


def _from_list(value: Any, error: Exception) -> Tensor:
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, Tensor) for item in value):
        try:
            return torch.stack([item.detach() for item in value])
        except Exception as unequal:
            error = unequal
    raise SondeError(
        f"This {type(value).__name__} has no shape as a tensor: {reason(error)}.\n"
        "Give numbers only, in rows of equal length, or inspect its parts one by one."
    ) from None


@torch.no_grad()
def quick(value: Any) -> Quick:
    """One pass of the kernel over one tensor, array or list. A tensor on a device is waited for."""
    tensor = as_tensor(value)
    rows = StatisticsTable(1)
    rows.measure_one(0, tensor)
    rows.synchronize()
    if 0 in rows.unsupported:
        return _unmeasured(tensor, rows.unsupported[0])
    row = dict(zip(STATISTICS, rows.values[0].tolist()))
    num, zeros, nan, inf = (int(row[name]) for name in ("num", "zeros", "nan", "inf"))
    num_finite = num - nan - inf
    if not num_finite:
        return Quick(num, math.nan, math.nan, math.nan, math.nan, 0.0, 0.0, zeros, nan, inf)
    mean, std, low, high, l2 = (row[name] for name in ("mean", "std", "min", "max", "l2"))
    if low >= 0 or high <= 0:
        l1 = abs(mean) * num_finite  # all of one sign: known already
    else:
        try:
            l1 = _sum_of_magnitudes(tensor, is_finite=num_finite == num)
        except Exception as error:
            return _unmeasured(tensor, reason(error))
    return Quick(num, mean, std, low, high, l1, l2, zeros, nan, inf)


def _unmeasured(tensor: Tensor, why: str) -> Quick:
    nan = math.nan
    return Quick(_num_elements(tensor), nan, nan, nan, nan, nan, nan, 0, 0, 0, why)


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
    """All stored elements in one flat numpy array of real numbers (float32 where that is exact), and how many zeros are not stored.

    Only sparse tensors have zeros that are not stored. Of complex numbers these are the absolute values. The array may share memory
    with the tensor: read it, do not write it. Raises a `SondeError` where there is nothing to read.
    """
    tensor = as_tensor(value)
    try:
        values, num_implicit = values_of(readable(tensor))
        values = values.reshape(-1)
        if values.dtype is not torch.float64:
            values = real_part(values, torch.float32 if values.dtype in _EXACT_IN_FLOAT32 else torch.float64)
        array: Floats = values.resolve_neg().cpu().numpy()
    except Exception as error:
        raise SondeError(f"This tensor has no numbers to read: {reason(error)}.") from None
    return array, num_implicit

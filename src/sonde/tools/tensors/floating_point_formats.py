"""Floating-point formats, and the margins of a tensor's values to overflow and underflow in a format, in powers of two."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sonde.errors import SondeError
from sonde.statistics import exponent_histogram
from sonde.statistics.statistics_without_extension import LOWEST_EXPONENT
from sonde.tools.tensors.describe_tensor import FastStatistics, fast_statistics

_NAMES = {
    "fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
_OTHER_NAMES = {"float": "fp32", "double": "fp64", "half": "fp16", "fp8": "fp8_e4m3", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}
_OTHER_NAMES |= {torch_name: name for name, torch_name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Limits of a floating-point format. Logarithms are to base two."""

    name: str  # "fp16"
    max: float
    normal_log2: int  # the smallest normal number
    denormal_log2: int  # the smallest number above zero; half of it or less becomes zero
    mantissa_bits: int

    @property
    def max_log2(self) -> float:
        return math.log2(self.max)


def _format(name: str, dtype: torch.dtype) -> NumberFormat:
    limits = torch.finfo(dtype)
    mantissa = round(-math.log2(limits.eps))
    normal = round(math.log2(limits.smallest_normal))
    return NumberFormat(name, float(limits.max), normal, normal - mantissa, mantissa)


FORMATS: Mapping[str, NumberFormat] = {
    name: _format(name, getattr(torch, torch_name)) for name, torch_name in _NAMES.items() if hasattr(torch, torch_name)
}


def parse_format(dtype: Any) -> NumberFormat:
    """The format by name or dtype: "fp16", "float16", "half" and `torch.float16` are the same; "fp8" is e4m3."""
    name = str(dtype).removeprefix("torch.").lower()
    found = FORMATS.get(_OTHER_NAMES.get(name, name))
    if found is None:
        raise SondeError(f"{dtype!r} is not a supported floating-point format. Use one of {', '.join(FORMATS)}.")
    return found


def format_of_tensor(tensor: Tensor) -> NumberFormat | None:
    """The format of the tensor's dtype; None for integers, complex numbers and rare dtypes."""
    return format_of_dtype(tensor.dtype)


def format_of_dtype(dtype: torch.dtype | str) -> NumberFormat | None:
    """The same for a dtype, or its name."""
    return FORMATS.get(_OTHER_NAMES.get(str(dtype).removeprefix("torch."), ""))


@dataclass(frozen=True, slots=True)
class Margins:
    """Margins of a tensor's values in a format: negative beyond the limit, infinite without values."""

    format: NumberFormat
    overflow_log2: float  # from the largest magnitude up to the largest number of the format
    underflow_log2: float  # from the magnitude that 99 % of the non-zero numbers exceed down to the smallest number above zero
    flushed_share: float  # share of the non-zero numbers that would become zero
    denormal_share: float  # share of the non-zero numbers that would be denormal and lose digits
    spread_bits: float  # log2 of the steps of the format that the standard deviation spans; infinite for constant values


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """Statistics of a tensor and the histogram of its exponents."""

    stats: FastStatistics
    exponents: tuple[int, ...]  # floor(log2 |x|) of the non-zero finite numbers, ascending
    counts: tuple[int, ...]

    def scaled(self, log2: int) -> Magnitudes:
        """The same for a tensor multiplied by 2^log2."""
        factor = 2.0**log2
        scaled = {name: getattr(self.stats, name) * factor for name in ("mean", "std", "min", "max", "l1", "l2")}
        return Magnitudes(replace(self.stats, **scaled), tuple(exponent + log2 for exponent in self.exponents), self.counts)

    def margins_in(self, target: NumberFormat) -> Margins:
        """The margins of these values in a format."""
        largest = self.stats.max_abs
        num = sum(self.counts)
        if not num or not largest > 0:
            return Margins(target, math.inf, math.inf, 0.0, 0.0, math.inf)
        flushed = sum(n for exponent, n in zip(self.exponents, self.counts) if exponent < target.denormal_log2 - 1)
        below = sum(n for exponent, n in zip(self.exponents, self.counts) if exponent < target.normal_log2)
        if target.normal_log2 <= LOWEST_EXPONENT:  # the histogram ends at the exponents of float32, so for float64 only the maximum decides
            flushed, below = 0, num if math.log2(largest) < target.normal_log2 else 0
        spread = math.inf
        if self.stats.std > 0:
            center = max(abs(self.stats.mean), self.stats.std)
            step_log2 = max(math.floor(math.log2(center)) - target.mantissa_bits, target.denormal_log2)
            spread = math.log2(self.stats.std) - step_log2
        first_percent = next(exponent for exponent, passed in zip(self.exponents, accumulate(self.counts)) if passed > num / 100)
        overflow, underflow = target.max_log2 - math.log2(largest), first_percent - target.denormal_log2
        return Margins(target, overflow, underflow, flushed / num, (below - flushed) / num, spread)


def measure_magnitudes(tensor: Tensor) -> Magnitudes:
    """Measures a tensor: one pass for the statistics, one for the histogram. A tensor on a device is synchronized."""
    stats = fast_statistics(tensor)
    found = exponent_histogram.exponents(tensor) if not stats.unsupported else None
    exponents, counts = found if found is not None else ([], [])
    return Magnitudes(stats, tuple(exponents), tuple(counts))

"""What the floating-point formats can hold, and how far numbers are from their edges, in powers of two."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sonde.errors import SondeError
from sonde.statistics import exponent_histogram
from sonde.statistics.torch_ops import LOWEST_EXPONENT
from sonde.tools.fast_statistics import Quick, quick

_NAMES = {
    "fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
_OTHER_NAMES = {
    "float": "fp32", "double": "fp64", "half": "fp16", "fp8": "fp8_e4m3", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2",
    **{torch_name: name for name, torch_name in _NAMES.items()},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Format:
    """A floating-point format. Logarithms are to base two."""

    name: str  # "fp16"
    max: float
    normal_log2: int  # the smallest normal number
    denormal_log2: int  # the smallest number above zero; half of it and less becomes zero
    mantissa_bits: int

    @property
    def max_log2(self) -> float:
        return math.log2(self.max)


def _format(name: str, dtype: torch.dtype) -> Format:
    limits = torch.finfo(dtype)
    mantissa = round(-math.log2(limits.eps))
    normal = round(math.log2(limits.smallest_normal))
    return Format(name, float(limits.max), normal, normal - mantissa, mantissa)


FORMATS: Mapping[str, Format] = {
    name: _format(name, getattr(torch, torch_name)) for name, torch_name in _NAMES.items() if hasattr(torch, torch_name)
}


def format_named(dtype: Any) -> Format:
    """`"fp16"`, `"float16"`, `"half"` and `torch.float16` mean the same; "fp8" is its e4m3 variant."""
    said = str(dtype).removeprefix("torch.").lower()
    found = FORMATS.get(_OTHER_NAMES.get(said, said))
    if found is None:
        raise SondeError(f"{dtype!r} is no floating-point format that Sonde knows. Use one of {', '.join(FORMATS)}.")
    return found


def format_of(tensor: Tensor) -> Format | None:
    """The format in use; None for integers, complex numbers and rare types."""
    name = _OTHER_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    return FORMATS.get(name) if name is not None else None


@dataclass(frozen=True, slots=True)
class Margins:
    """How a tensor's numbers lie in a format. Positive margins are room, negative ones are loss; infinite where there is no number."""

    format: Format
    overflow_log2: float  # from the largest magnitude up to the largest number of the format
    underflow_log2: float  # from the magnitude that 99 % of the non-zero numbers exceed down to the smallest number above zero
    flushed_share: float  # of the non-zero numbers: would become zero
    denormal_share: float  # of the non-zero numbers: would have fewer digits than the format has
    spread_bits: float  # how many steps of the format, as a power of two, the standard deviation spans; infinite where nothing varies

    def fits(self) -> bool:
        return self.overflow_log2 >= 0


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """What is kept of a tensor: the kernel's statistics and its power-of-two histogram."""

    stats: Quick
    exponents: tuple[int, ...]  # floor(log2 |x|) of the non-zero finite numbers, rising
    counts: tuple[int, ...]

    def scaled(self, log2: int) -> Magnitudes:
        """As if every number had been multiplied by a power of two."""
        factor = 2.0**log2
        grown = {name: getattr(self.stats, name) * factor for name in ("mean", "std", "min", "max", "l1", "l2")}
        return Magnitudes(replace(self.stats, **grown), tuple(exponent + log2 for exponent in self.exponents), self.counts)

    def within(self, target: Format) -> Margins:
        largest = self.stats.max_abs
        num = sum(self.counts)
        if not num or not largest > 0:
            return Margins(target, math.inf, math.inf, 0.0, 0.0, math.inf)
        flushed = sum(n for exponent, n in zip(self.exponents, self.counts) if exponent < target.denormal_log2 - 1)
        below = sum(n for exponent, n in zip(self.exponents, self.counts) if exponent < target.normal_log2)
        if target.normal_log2 <= LOWEST_EXPONENT:  # the histogram ends where float32 does; of float64 only the whole can be told
            flushed, below = 0, num if math.log2(largest) < target.normal_log2 else 0
        centre = max(abs(self.stats.mean), self.stats.std)
        spread = math.inf
        if self.stats.std > 0:
            step_log2 = max(math.floor(math.log2(centre)) - target.mantissa_bits, target.denormal_log2)
            spread = math.log2(self.stats.std) - step_log2
        return Margins(
            format=target,
            overflow_log2=target.max_log2 - math.log2(largest),
            underflow_log2=self._lowest_but_one_percent(num) - target.denormal_log2,
            flushed_share=flushed / num,
            denormal_share=(below - flushed) / num,
            spread_bits=spread,
        )

    def _lowest_but_one_percent(self, num: int) -> int:
        passed = 0
        for exponent, count in zip(self.exponents, self.counts):
            passed += count
            if passed > num / 100:
                return exponent
        return self.exponents[-1]


def magnitudes(tensor: Tensor) -> Magnitudes:
    """One pass for the statistics, one for the histogram; a tensor on a device is waited for."""
    stats = quick(tensor)
    found = exponent_histogram.exponents(tensor) if not stats.unsupported else None
    exponents, counts = found if found is not None else ([], [])
    return Magnitudes(stats, tuple(exponents), tuple(counts))

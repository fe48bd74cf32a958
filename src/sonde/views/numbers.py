"""How views write quantities."""

from __future__ import annotations

import math

from sonde.rules.words import number


def value(given: float | str) -> str:
    """A piece of evidence: text as it is, numbers with three significant digits, NaN and the infinities by name."""
    return given if isinstance(given, str) else number(given)


def percent(share: float) -> str:
    """A share as a percentage: `1.3 %`; small but not nothing is `< 0.1 %`."""
    if not math.isfinite(share):
        return "unknown"
    return "< 0.1 %" if 0 < share < 0.001 else f"{share:.1%}".replace("%", " %")


def counted(num: int, thing: str) -> str:
    """`1 step`, `1,200 steps`."""
    return f"{num:,} {thing}" if num == 1 else f"{num:,} {thing}s"

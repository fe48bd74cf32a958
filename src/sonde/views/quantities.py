"""How views of profiles write times, counts and bytes: three digits that a person reads at a glance, a dash where nothing was measured."""

from __future__ import annotations

import math

NOTHING = "–"


def milliseconds(ms: float) -> str:
    """`12.3`; what was not measured is a dash, what is very small `<0.001`."""
    if not math.isfinite(ms):
        return NOTHING if math.isnan(ms) else "Infinity" if ms > 0 else "-Infinity"
    if 0 < ms < 0.001:
        return "<0.001"
    digits = next((digits for digits, limit in ((3, 0.0995), (2, 9.995), (1, 99.95)) if abs(ms) < limit), 0)
    return f"{ms:,.{digits}f}" if ms else "0"


def large(value: float, unit: str = "") -> str:
    """`1.26 G`, `640 kB`: in steps of a thousand."""
    if not math.isfinite(value):
        return NOTHING
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * scale:
            return f"{_three(value / scale)} {letter}{unit}"
    return f"{_three(value)} {unit}".rstrip()


def whole_percent(share: float) -> str:
    """`34 %`, `<1 %`; a dash where it is not known."""
    if not math.isfinite(share):
        return NOTHING
    return "<1 %" if 0 < share < 0.005 else f"{share:.0%}".replace("%", " %")


def factor(ratio: float) -> str:
    """`1.8x`."""
    return f"{ratio:.2f}x" if math.isfinite(ratio) else NOTHING


def _three(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 or float(value).is_integer() else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"

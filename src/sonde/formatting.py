"""Formats quantities with a unit, the same in every output."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """`512 bytes`, `3.2 MiB`."""
    sign, num_bytes = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{sign}{_short(num_bytes) if unit != 'bytes' else round(num_bytes)} {unit}"
        num_bytes /= 1024
    return f"{sign}{_short(num_bytes)} GiB"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"

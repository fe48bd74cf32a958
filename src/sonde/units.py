"""How quantities with a unit are said, in every room alike."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """`512 bytes`, `3.2 MiB`."""
    sign, num_bytes = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return sign + (f"{num_bytes:.3g} {unit}" if unit != "bytes" else f"{num_bytes:.0f} bytes")
        num_bytes /= 1024
    return f"{sign}{num_bytes:.3g} GiB"

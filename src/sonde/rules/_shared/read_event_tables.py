"""Reads the tables inside of events. Their cells come from the log and may have any type."""

from collections.abc import Mapping
from math import isnan
from typing import Any

MAX_INTEGER = 1 << 53  # a larger count comes from a damaged log


def amount(row: Mapping[str, Any], name: str) -> float:
    """A number of a row; 0 if it is none."""
    value = row.get(name)
    try:
        number = float(value) if isinstance(value, (int, float)) else 0.0
    except OverflowError:  # an integer beyond the range of float comes from a damaged log
        return 0.0
    return 0.0 if isnan(number) else number


def count(row: Mapping[str, Any], name: str) -> int:
    """A number of things; 0 if it is none."""
    value = amount(row, name)
    return int(value) if 0 <= value < MAX_INTEGER else 0


def text(row: Mapping[str, Any], name: str) -> str:
    """A text of a row; empty if it has none."""
    value = row.get(name)
    return value if isinstance(value, str) else ""

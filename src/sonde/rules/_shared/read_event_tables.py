"""Reads the tables inside of events. Their cells come from the log and may have any type."""

from collections.abc import Mapping
from math import isnan
from typing import Any


def amount(row: Mapping[str, Any], name: str) -> float:
    """A number of a row; 0 if it is none."""
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) and not isnan(value) else 0.0


def text(row: Mapping[str, Any], name: str) -> str:
    """A text of a row; empty if it has none."""
    value = row.get(name)
    return value if isinstance(value, str) else ""

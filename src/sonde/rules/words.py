"""How rules put numbers and places into sentences. Nothing here knows a screen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any


def number(value: float) -> str:
    """Three significant digits: what a person would say aloud. Non-finite values keep their names."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    if float(value).is_integer() and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}"


def listing(names: Sequence[str], limit: int = 3) -> str:
    """`a, b, c and 12 more`."""
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def modules_of(parameters: Iterable[str], everything: Collection[str]) -> list[str]:
    """The fewest modules that hold exactly these parameters, in their order: `encoder` instead of its forty weights.

    A module stands for its parameters only where all of its parameters in `everything` are meant. A parameter without
    such a module keeps its own path.
    """
    meant = list(dict.fromkeys(parameters))
    meant_set = set(meant)
    mixed: set[str] = {""}  # modules that also hold parameters that are not meant; the whole model is never "a module of it"
    for path in everything:
        if path not in meant_set:
            mixed.update(_owners(path))
    chosen: dict[str, None] = {}
    for path in meant:
        place = path
        for owner in _owners(path):
            if owner in mixed:
                break
            place = owner
        chosen[place] = None
    return list(chosen)


def _owners(path: str) -> list[str]:
    """From the nearest module to the farthest: `a.b.weight` gives `a.b`, `a`."""
    parts = path.split(".")[:-1]
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def amount(row: Mapping[str, Any], name: str) -> float:
    """A number of a row that somebody else wrote; 0 where it is none."""
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) and value == value else 0.0


def rows_of(data: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """What an event lists under this name: the lines, the waits or the layers of a step that was looked at."""
    rows = data.get(name)
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []

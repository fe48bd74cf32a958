"""Names beside many rows. A few rows get a name each; many get the name of the module that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

MOST_LABELS = 48  # what fits beside a picture in type that can still be read


class Label(NamedTuple):
    """The rows `first` to `last` and what they are called."""

    text: str
    first: int
    last: int

    @property
    def middle(self) -> float:
        return (self.first + self.last) / 2


def row_labels(names: Sequence[str], limit: int = MOST_LABELS) -> list[Label]:
    """At most `limit` labels for rows in their order: names, or modules, or every so many-th name."""
    if len(names) <= limit:
        return [Label(name, row, row) for row, name in enumerate(names)]
    parts = [name.split(".") for name in names]
    for depth in range(max(map(len, parts)), 0, -1):
        groups = _groups(parts, depth)
        if len(groups) <= limit:
            if len(groups) * 8 < limit:
                break  # one module for hundreds of rows says less than some of their names
            return groups
    stride = -(-len(names) // limit)
    return [Label(names[row], row, row) for row in range(0, len(names), stride)]


def _groups(parts: Sequence[Sequence[str]], depth: int) -> list[Label]:
    found, row = [], 0
    for prefix, members in groupby(parts, key=lambda path: tuple(path[:depth])):
        num = len(list(members))
        found.append(Label(".".join(prefix), row, row + num - 1))
        row += num
    return found

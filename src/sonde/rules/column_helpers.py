"""Questions that rules ask of columns: rows of steps in which a condition holds, and values that start, end or stay."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sonde.runlog.record_index import Ints

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]


class Streak(NamedTuple):
    """Entries in a row for which a condition holds: `column[start:stop]`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """All entries from start to stop, also those that were not `among` the relevant ones."""
        return self.stop - self.start


def streaks(condition: Bools, among: Bools | None = None) -> list[Streak]:
    """All streaks of a condition. Entries that are not `among` neither end a streak nor count; positions are those of the whole column."""
    starts, stops = _bounds(condition, among)
    return [Streak(start, stop) for start, stop in zip(starts.tolist(), stops.tolist())]


def first_streak(counts: Array, *, sum_at_least: float, among: Bools | None = None) -> Streak | None:
    """The first streak of non-zero entries whose sum reaches a limit. Entries that are not `among` do not end a streak, and count if they
    are not zero."""
    is_nonzero = counts != 0
    starts, stops = _bounds(is_nonzero, None if among is None else among | is_nonzero)
    if not len(starts):
        return None
    sums = np.add.reduceat(counts, starts)  # from each start to the next: all entries after a streak are zero
    at = first_where(sums >= sum_at_least)
    return None if at is None else Streak(int(starts[at]), int(stops[at]))


def last_streak(condition: Bools, among: Bools | None = None) -> Streak | None:
    """The streak that lasts to the end; None if the condition does not hold for the last entry (`among` the relevant ones)."""
    relevant = np.arange(len(condition)) if among is None else np.flatnonzero(among)
    if not len(relevant) or not condition[relevant[-1]]:
        return None
    ends = np.flatnonzero(~condition[relevant])
    return Streak(int(relevant[ends[-1] + 1 if len(ends) else 0]), int(relevant[-1]) + 1)


def _bounds(condition: Bools, among: Bools | None) -> tuple[Ints, Ints]:
    """Start and stop of each streak."""
    relevant = np.arange(len(condition)) if among is None else np.flatnonzero(among)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], condition[relevant], [False]]).astype(np.int8)))
    return relevant[edges[::2]], relevant[edges[1::2] - 1] + 1


def first_where(condition: Bools) -> int | None:
    """The index of the first entry for which the condition holds."""
    indices = np.flatnonzero(condition)
    return int(indices[0]) if len(indices) else None


def first_number(column: Array) -> float:
    """The first entry that is not NaN; NaN if there is none."""
    at = first_where(~np.isnan(column))
    return float("nan") if at is None else float(column[at])


def last_number(column: Array) -> float:
    """The last entry that is not NaN; NaN if there is none."""
    return first_number(column[::-1])


def largest_number(column: Array) -> float:
    """The largest entry that is not NaN; NaN if there is none."""
    known = column[~np.isnan(column)]
    return float(known.max()) if len(known) else float("nan")

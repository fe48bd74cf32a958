"""Does a number grow without end? For the memory of a process, in the training loop and in the rules alike.

Memory grows for good reasons too: the first steps fill caches and make the optimizer's state, batches differ in length, a collector runs
when it likes. So the beginning is left out, every stretch is judged by its lowest value, and a growth that slows down is none.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

MAX_POINTS = 256  # beyond, every second is dropped
ENOUGH = 12  # points: fewer are no trend
SETTLED = 0.3  # of the steps so far are the beginning
STRETCHES = 4
EVEN = 2.5  # one half grows at most so many times faster than the other; what fills up grows slower and slower


class Trend(NamedTuple):
    """A steady growth."""

    first_step: int
    last_step: int
    first: float  # lowest value of the first stretch, and of the last
    last: float
    per_step: float


class Growth:
    """Takes values step by step; bounded in memory."""

    __slots__ = ("_every", "_points", "_skipped")

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._every, self._skipped = 1, 0

    def see(self, step: int, value: float) -> None:
        self._skipped += 1
        if self._skipped >= self._every:
            self._skipped = 0
            self._points.append((step, value))
            if len(self._points) >= MAX_POINTS:
                del self._points[::2]
                self._every *= 2

    @property
    def num_points(self) -> int:
        return len(self._points)

    def trend(self, least: float) -> Trend | None:
        """The growth of the settled part, where it is steady and by `least` in all."""
        if not self._points:
            return None
        last_step = self._points[-1][0]
        begin = self._points[0][0] + SETTLED * (last_step - self._points[0][0])
        points = [point for point in self._points if point[0] >= begin]
        if len(points) < ENOUGH:
            return None
        cuts = [round(i * len(points) / STRETCHES) for i in range(STRETCHES + 1)]
        lows = [min(points[start:end], key=lambda one: (one[1], one[0])) for start, end in pairwise(cuts)]
        if any(after[1] <= before[1] for before, after in pairwise(lows)) or lows[-1][1] - lows[0][1] < least:
            return None
        middle = lows[STRETCHES // 2]
        early, late = _rate(lows[0], middle), _rate(middle, lows[-1])
        if late < early / EVEN:
            return None
        return Trend(lows[0][0], last_step, lows[0][1], lows[-1][1], _rate(lows[0], lows[-1]))


def _rate(before: tuple[int, float], after: tuple[int, float]) -> float:
    return (after[1] - before[1]) / max(1, after[0] - before[0])

"""When memory is a problem: it grows steadily, or it exceeds a threshold of the user's. For the training loop and for the rules.

Memory also grows for good reasons: caches fill, batches differ in length, the garbage collector runs at irregular times. So the first part
is ignored, every segment is represented by its minimum, and a growth that slows down does not count.
"""

from itertools import pairwise
from typing import NamedTuple

MAX_POINTS = 256  # beyond that, every second one is dropped
MIN_POINTS = 12  # fewer show no trend
WARMUP_SHARE = 0.3  # of the steps so far, ignored
NUM_SEGMENTS = 4
MAX_SLOWDOWN = 2.5  # the first half grows at most so many times faster than the second: a cache that fills up slows down


MB = 2**20


class MemoryThreshold(NamedTuple):
    """A threshold of the user's for the memory of a process."""

    num_bytes: float
    setting: str  # that sets it, as the user writes it

    @classmethod
    def from_settings(cls, mb: float | None, share: float | None, limit_bytes: int | None) -> "MemoryThreshold | None":
        """The lower of an absolute threshold and of a share of what the process may use. None without one; a share needs the limit."""
        absolute = [cls(mb * MB, f"memory_threshold_mb={mb:g}")] if mb else []
        relative = [cls(share * limit_bytes, f"memory_threshold_share={share:g}")] if share and limit_bytes else []
        return min([*absolute, *relative], default=None)


class SteadyGrowth(NamedTuple):
    """Steady growth between two steps."""

    first_step: int
    last_step: int
    first: float  # minimum of the first segment, and of the last
    last: float
    per_step: float


class MemoryTrend:
    """Collects values step by step, in bounded memory, and finds steady growth in them."""

    __slots__ = ("_every", "_points", "_skipped")

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._every, self._skipped = 1, 0

    def update(self, step: int, value: float) -> None:
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

    def trend(self, least: float) -> SteadyGrowth | None:
        """The growth after the warm-up, if it is steady and at least `least` in all."""
        if not self._points:
            return None
        last_step = self._points[-1][0]
        begin = self._points[0][0] + WARMUP_SHARE * (last_step - self._points[0][0])
        points = [point for point in self._points if point[0] >= begin]
        if len(points) < MIN_POINTS:
            return None
        cuts = [round(i * len(points) / NUM_SEGMENTS) for i in range(NUM_SEGMENTS + 1)]
        lows = [min(points[start:end], key=lambda one: (one[1], one[0])) for start, end in pairwise(cuts)]
        if any(after[1] <= before[1] for before, after in pairwise(lows)) or lows[-1][1] - lows[0][1] < least:
            return None
        middle = lows[NUM_SEGMENTS // 2]
        early, late = _rate(lows[0], middle), _rate(middle, lows[-1])
        if late < early / MAX_SLOWDOWN:
            return None
        return SteadyGrowth(lows[0][0], last_step, lows[0][1], lows[-1][1], _rate(lows[0], lows[-1]))


def _rate(before: tuple[int, float], after: tuple[int, float]) -> float:
    return (after[1] - before[1]) / max(1, after[0] - before[0])

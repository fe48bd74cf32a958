"""Live bytes of one device, by category and module, with the peak and a timeline."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from sonde.memory_profiler.memory_report import CATEGORIES, Peak, TimelinePoint, Usage

MAX_POINTS = 1024  # of the timeline: more than a plot has columns
_INDEX = {category: index for index, category in enumerate(CATEGORIES)}

Owner = tuple[str, str]  # category, path of the module


class DeviceUsage:
    """Counts live bytes by owner, and copies the counts at every new maximum."""

    def __init__(self, start: float, describe_moment: Callable[[], Peak]) -> None:
        """`describe_moment` returns the current phase, module and operation, as a peak without numbers."""
        self._start, self._describe_moment = start, describe_moment
        self.total = 0
        self.batch_bytes = 0  # part of the total that grows with the batch
        self.batch_most, self.batch_rest = 0, 0  # highest value of `batch_bytes`, and the other live bytes at that moment
        self._owners: dict[Owner, int] = {}
        self._categories = [0] * len(CATEGORIES)
        self._highest = 0
        self._is_peak_pending = False  # the total is at a new maximum that was not copied yet
        self._peak = Peak(Usage())
        self._peak_owners: dict[Owner, int] = {}
        self._peak_batch_bytes = 0
        self._points: list[TimelinePoint] = []
        self._changes_per_point, self._num_changes = 1, 0  # the latter since the last point

    def change(self, owner: Owner, num_bytes: int, *, with_batch: bool = False) -> None:
        """Adds (or with a negative number removes) bytes; `with_batch` if they grow with the batch."""
        if num_bytes < 0 and self._is_peak_pending:
            self._copy_peak()
        self.total += num_bytes
        if with_batch:
            self.batch_bytes += num_bytes
            if self.batch_bytes >= self.batch_most:
                self.batch_most, self.batch_rest = self.batch_bytes, self.total - self.batch_bytes
        self._owners[owner] = self._owners.get(owner, 0) + num_bytes
        self._categories[_INDEX[owner[0]]] += num_bytes
        if self.total >= self._highest and num_bytes > 0:  # also if equal: in later steps more owners are known
            self._highest, self._is_peak_pending = self.total, True
            self._peak = self._describe_moment()

    def move(self, before: Owner, after: Owner, num_bytes: int) -> None:
        """Assigns the same bytes to another owner."""
        self._owners[before] = self._owners.get(before, 0) - num_bytes
        self._owners[after] = self._owners.get(after, 0) + num_bytes
        self._categories[_INDEX[before[0]]] -= num_bytes
        self._categories[_INDEX[after[0]]] += num_bytes

    def end_operation(self) -> None:
        """Adds a point to the timeline. Once it is full, neighboring points are merged and the higher one stays."""
        point = TimelinePoint(perf_counter() - self._start, tuple(self._categories))
        self._num_changes += 1
        if self._points and self._num_changes < self._changes_per_point:
            if point.total > self._points[-1].total:
                self._points[-1] = point
            return
        self._num_changes = 0
        self._points.append(point)
        if len(self._points) >= MAX_POINTS:
            self._points = [max(pair, key=lambda one: one.total) for pair in zip(self._points[::2], self._points[1::2])]
            self._changes_per_point *= 2

    def usage(self) -> Usage:
        return _usage(self._owners)

    def peak(self) -> Peak:
        if self._is_peak_pending:
            self._copy_peak()
        peak = self._peak
        return Peak(
            _usage(self._peak_owners), peak.time_s, peak.phase, peak.module, peak.operation, peak.source, self._peak_batch_bytes
        )  # fmt: skip

    def timeline(self) -> tuple[TimelinePoint, ...]:
        return tuple(self._points)

    def _copy_peak(self) -> None:
        self._is_peak_pending = False
        self._peak_owners = dict(self._owners)
        self._peak_batch_bytes = self.batch_bytes


def _usage(owners: dict[Owner, int]) -> Usage:
    by_category: dict[str, dict[str, int]] = {}
    for (category, path), num_bytes in owners.items():
        if num_bytes:
            by_category.setdefault(category, {})[path] = num_bytes
    return Usage(by_category)

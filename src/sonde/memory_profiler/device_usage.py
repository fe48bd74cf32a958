"""The account of one device: what is alive on it, by category and module, and the moment at which it was most."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from sonde.memory_profiler.memory_report import CATEGORIES, Peak, Point, Usage

MAX_POINTS = 1024  # of a timeline: more than a picture has columns
_ROW = {category: row for row, category in enumerate(CATEGORIES)}

Place = tuple[str, str]  # category, path of the module


class Account:
    """Bytes that come and go. A copy of them is kept from the last moment at which there were more than ever before."""

    def __init__(self, began: float, where: Callable[[], Peak]) -> None:
        self._began, self._where = began, where  # `where` says what is under way, as a peak without numbers
        self.total = 0
        self.batch_bytes = 0  # of the total, what grows with the batch
        self.batch_most, self.batch_rest = 0, 0  # when that was most, and what else was alive then
        self._places: dict[Place, int] = {}
        self._categories = [0] * len(CATEGORIES)
        self._highest = 0
        self._rose = False  # above all that was before, and no copy was made yet
        self._peak = Peak(Usage())
        self._peak_places: dict[Place, int] = {}
        self._peak_batch = 0
        self._points: list[Point] = []
        self._every, self._since = 1, 0  # changes per point of the timeline, and since the last one

    def change(self, place: Place, num_bytes: int, *, with_batch: bool = False) -> None:
        if num_bytes < 0 and self._rose:
            self._keep()
        self.total += num_bytes
        if with_batch:
            self.batch_bytes += num_bytes
            if self.batch_bytes >= self.batch_most:
                self.batch_most, self.batch_rest = self.batch_bytes, self.total - self.batch_bytes
        self._places[place] = self._places.get(place, 0) + num_bytes
        self._categories[_ROW[place[0]]] += num_bytes
        if self.total >= self._highest and num_bytes > 0:  # also as high as before: later steps know better what is whose
            self._highest, self._rose = self.total, True
            self._peak = self._where()

    def move(self, before: Place, after: Place, num_bytes: int) -> None:
        """The same bytes turn out to be something else."""
        self._places[before] = self._places.get(before, 0) - num_bytes
        self._places[after] = self._places.get(after, 0) + num_bytes
        self._categories[_ROW[before[0]]] -= num_bytes
        self._categories[_ROW[after[0]]] += num_bytes

    def settled(self) -> None:
        """An operation is over: a point for the timeline. Of several that share a place the highest stays."""
        point = Point(perf_counter() - self._began, tuple(self._categories))
        self._since += 1
        if self._points and self._since < self._every:
            if point.total > self._points[-1].total:
                self._points[-1] = point
            return
        self._since = 0
        self._points.append(point)
        if len(self._points) >= MAX_POINTS:
            self._points = [max(pair, key=lambda one: one.total) for pair in zip(self._points[::2], self._points[1::2])]
            self._every *= 2

    def usage(self) -> Usage:
        return _usage(self._places)

    def peak(self) -> Peak:
        if self._rose:
            self._keep()
        peak = self._peak
        return Peak(
            _usage(self._peak_places), peak.time_s, peak.phase, peak.module, peak.operation, peak.source, self._peak_batch
        )  # fmt: skip

    def timeline(self) -> tuple[Point, ...]:
        return tuple(self._points)

    def _keep(self) -> None:
        self._rose = False
        self._peak_places = dict(self._places)
        self._peak_batch = self.batch_bytes


def _usage(places: dict[Place, int]) -> Usage:
    found: dict[str, dict[str, int]] = {}
    for (category, path), num_bytes in places.items():
        if num_bytes:
            found.setdefault(category, {})[path] = num_bytes
    return Usage(found)

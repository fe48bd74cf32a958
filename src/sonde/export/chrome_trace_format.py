"""The Chrome trace format: what Perfetto, chrome://tracing and TensorBoard open. Tracks hold spans and instants, processes hold counters.

Times are microseconds from the beginning of the trace. Spans of one track must lie inside or after each other, or viewers drop them.
"""

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sonde.errors import SondeError
from sonde.formatting import number, printable, strict

SUFFIXES = (".json", ".json.gz")
LONGEST_NAME = 300  # characters of a name: a viewer shows a fraction of it, and repeats it in every span


class Track(NamedTuple):
    """A row of a trace: a thread, for viewers."""

    pid: int
    tid: int


class Times(NamedTuple):
    """When something began and how long it took."""

    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


class Trace:
    """Collects events; `encoded()` is the file."""

    def __init__(self, about: Mapping[str, Any] | None = None) -> None:
        self._about = dict(about or {})
        self._events: list[dict[str, Any]] = []
        self._num_pids = self._num_tids = 0  # numbers from 1 on: viewers take 0 for the system's own

    def process(self, name: str, *, labels: str = "") -> int:
        self._num_pids += 1
        pid = self._num_pids
        self._name(pid, 0, "process_name", name=_shown(name))
        self._name(pid, 0, "process_sort_index", sort_index=pid)
        if labels:
            self._name(pid, 0, "process_labels", labels=_shown(labels))
        return pid

    def track(self, pid: int, name: str) -> Track:
        self._num_tids += 1
        # Viewers know threads by their number alone, so no two processes share one.
        track = Track(pid, 100 + self._num_tids)
        self._name(*track, "thread_name", name=_shown(name))
        self._name(*track, "thread_sort_index", sort_index=self._num_tids)
        return track

    def span(self, track: Track, name: str, times: Times, args: Mapping[str, Any] | None = None, *, category: str = "sonde") -> None:
        start, end = round(times.start_us, 3), round(times.end_us, 3)  # whole nanoseconds: so what is nested stays nested
        self._add("X", track, name, start, args, cat=category, dur=round(max(end - start, 0.0), 3))

    def instant(self, track: Track, name: str, at_us: float, args: Mapping[str, Any] | None = None, *, category: str = "sonde") -> None:
        self._add("i", track, name, round(at_us, 3), args, cat=category, s="t")

    def counter(self, track: Track, name: str, at_us: float, value: float) -> None:
        """A point of a curve; a non-finite value becomes an instant on the track."""
        if math.isfinite(value):
            self._add("C", Track(track.pid, 0), name, round(at_us, 3), {"value": value})
        else:
            self.instant(track, f"{name} is {number(value)}", at_us, {"value": value}, category="not finite")

    def encoded(self) -> bytes:
        document = {"traceEvents": self._events, "displayTimeUnit": "ms", "otherData": strict(self._about)}
        return json.dumps(document, allow_nan=False, separators=(",", ":")).encode("utf-8", "backslashreplace")

    def _add(self, phase: str, track: Track, name: str, at_us: float, args: Mapping[str, Any] | None, **more: Any) -> None:
        event = {"ph": phase, "name": _shown(name), "pid": track.pid, "tid": track.tid, "ts": at_us, **more}
        if args:
            event["args"] = strict(args)
        self._events.append(event)

    def _name(self, pid: int, tid: int, kind: str, **args: Any) -> None:
        self._events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args})


def _shown(name: str) -> str:
    text = printable(name)
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "…"


S = TypeVar("S", bound=Any)


def in_lanes(spans: Iterable[tuple[Times, S]]) -> Iterator[tuple[int, Times, S]]:
    """Spans in order of time, each with the first lane on which it lies inside or after what is there already."""
    lanes: list[list[float]] = []  # of each lane, the ends of the spans that are open, outermost first
    for times, what in sorted(spans, key=lambda each: (each[0].start_us, -each[0].duration_us)):
        start, end = round(times.start_us, 3), round(times.end_us, 3)
        for open_ends in lanes:
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
        lane = next((number for number, open_ends in enumerate(lanes) if not open_ends or end <= open_ends[-1]), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(end)
        yield lane, times, what


def compressed(trace: Trace, path: Path) -> bytes:
    """The bytes of the file of that name: `.json`, or `.json.gz` for a tenth of the size."""
    name = path.name.lower()
    if not name.endswith(SUFFIXES):
        raise SondeError(f"{path} ends in none of {', '.join(SUFFIXES)}: a trace is one of these.")
    content = trace.encoded()
    return gzip.compress(content, 6, mtime=0) if name.endswith(".gz") else content

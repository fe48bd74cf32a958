"""How long each line of the user's own code took in one step, and how often it ran.

Python calls a tracer for every line. Only frames of the user's code are traced line by line; of a library's frames there is one event each.
A line is charged with everything that ran in it or below it until the next line of the user's code began: `loss.backward()` with all of
the backward, `x = layer(x)` with what torch did for it. A debugger that traces already is left alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from linecache import getline
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any, NamedTuple

from sonde.capture.call_site import is_library as _in_library
from sonde.capture.call_site import release_locals
from sonde.capture.phase_timer import PhaseTimer

MAX_EVENTS = 6_000  # in a row: tracing more lines would take longer, 5 ms, than the profile of one step may cost
MAX_PAUSES = 2  # in one step: so often it is given up; the first time it is taken up again with the next phase
MAX_LINES = 24  # recorded of one step: a report names one or two
LIBRARY_NS = 150  # what the event of a library's frame takes, measured; so many that a clock for each would double it
EVENT_NS = 60  # what Python takes to call a tracer, measured: it is outside of what the tracer itself can time

@cache
def is_library(filename: str) -> bool:
    return filename == "<string>" or _in_library(filename)  # what a library makes with exec


Trace = Callable[[FrameType, str, Any], Any]
Key = tuple[str, int]  # file and line


class LineTime(NamedTuple):
    line: str  # train.py:41
    text: str
    function: str
    num: int  # times that it began; at least so often, where it was given up
    ms: float


class LineTimes:
    """Between `start` and `stop`, in one thread."""

    def __init__(self, timer: PhaseTimer) -> None:
        self._timer = timer
        self.active = self._paused = False
        self._times: dict[Key, list[float]] = {}  # nanoseconds, number
        self._functions: dict[Key, str] = {}
        self._current: Key | None = None  # the line that is charged
        self._traced: list[FrameType] = []
        self._global: Trace = self._called  # bound once, so that they can be recognised
        self._local: Trace = self._happened

    def start(self) -> bool:
        """False where it cannot be done: a debugger or a coverage tool traces already."""
        if sys.gettrace() is not None:
            return False
        self._num_events = self._num_library = self._num_pauses = 0
        self._paused = False
        self._thread = get_ident()
        self.active = True
        _running.add(self)
        self._follow()
        return True

    def _follow(self) -> None:
        """From now on; also the functions that are under way."""
        frame: FrameType | None = sys._getframe(2)
        self._current = self._key(frame)
        while frame is not None:
            if not is_library(frame.f_code.co_filename) and frame.f_trace is None:
                frame.f_trace = self._local
                self._traced.append(frame)
            frame = frame.f_back
        self._last_ns, self._last_own_ns = perf_counter_ns(), self._timer.own_ns
        sys.settrace(self._global)

    def stop(self) -> list[LineTime]:
        """The lines that took longest, the longest first."""
        if self.active:
            self._charge(perf_counter_ns())
            self.leave()
        longest = sorted(self._times.items(), key=lambda item: -item[1][0])[:MAX_LINES]
        found = [
            LineTime(f"{Path(file).name}:{line}", getline(file, line).strip(), self._functions[file, line], int(num), max(0.0, ns) / 1e6)
            for (file, line), (ns, num) in longest
        ]
        self._times, self._functions = {}, {}
        return found

    def resume(self) -> None:
        """A phase begins. Where there were too many lines to follow them all, what passed since belongs to the line where it was given
        up, and now they are followed again."""
        if self._paused and self.active and get_ident() == self._thread:
            self._charge(perf_counter_ns())
            self._current = None
            if self._num_pauses < MAX_PAUSES and sys.gettrace() is None:
                self._paused, self._num_events = False, 0
                self._follow()

    def leave(self) -> None:
        self.active = False
        _running.discard(self)
        at_home = get_ident() == self._thread
        if at_home and sys.gettrace() is self._global:
            sys.settrace(None)
        for frame in self._traced:
            if frame.f_trace is self._local:
                frame.f_trace = None
            if at_home:
                release_locals(frame)
        self._traced.clear()

    # -- what Python calls -------------------------------------------------------------------------

    def _called(self, frame: FrameType, event: str, arg: Any) -> Trace | None:
        self._num_library += 1
        if is_library(frame.f_code.co_filename):
            return None
        if not self.active:
            sys.settrace(None)  # the step ended in another thread
            return None
        return self._happened(frame, event, arg)

    def _happened(self, frame: FrameType, event: str, arg: Any) -> Trace | None:
        if not self.active:
            return None
        began = perf_counter_ns()
        self._charge(began)
        if event == "line":
            key = self._current = (frame.f_code.co_filename, frame.f_lineno)
            known = self._times.get(key)
            if known is None:
                known = self._learn(key, frame)
            known[1] += 1
        elif event == "return":
            self._current = self._key(frame.f_back)
        self._num_events += 1
        if self._num_events >= MAX_EVENTS:
            self._paused = True
            self._num_pauses += 1
            sys.settrace(None)
        now = perf_counter_ns()
        self._timer.own_ns += now - began + EVENT_NS
        self._last_ns, self._last_own_ns = now, self._timer.own_ns
        return self._local

    # -- inside ------------------------------------------------------------------------------------

    def _charge(self, now: int) -> None:
        if self._num_library:
            self._timer.own_ns += self._num_library * LIBRARY_NS
            self._num_library = 0
        if self._current is not None:
            self._times[self._current][0] += now - self._last_ns - (self._timer.own_ns - self._last_own_ns)

    def _key(self, frame: FrameType | None) -> Key | None:
        """The line of the user's that is under way in or above a frame."""
        while frame is not None and is_library(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return None
        key = (frame.f_code.co_filename, frame.f_lineno)
        if key not in self._times:
            self._learn(key, frame)
        return key

    def _learn(self, key: Key, frame: FrameType) -> list[float]:
        self._functions[key] = frame.f_code.co_name
        known = self._times[key] = [0.0, 0.0]
        return known


_running: set[LineTimes] = set()


def _leave_in_child() -> None:
    """A worker that is forked in the middle of the step is nobody's training."""
    for times in list(_running):
        times.leave()


os.register_at_fork(after_in_child=_leave_in_child)

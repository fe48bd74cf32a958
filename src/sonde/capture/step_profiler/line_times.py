"""Times each line of the user's code in one step, and counts its executions.

`sys.settrace` calls a tracer for every line of the user's code; if a debugger is tracing already, nothing is timed. The time of a line
includes all calls until the next line of the user's code starts: `loss.backward()` includes the whole backward.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from linecache import getline
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any

from sonde.capture.step_phase_timer import PhaseTimer
from sonde.capture.user_source_line import is_library as _in_library
from sonde.capture.user_source_line import release_locals

MAX_EVENTS = 6_000  # in a row: more would take longer than 5 ms, which is too much for the profile of one step
MAX_PAUSES = 2  # per step: after the first, tracing resumes with the next phase; after the second it ends
MAX_LINES = 24  # recorded per step: a report names one or two
LIBRARY_NS = 150  # measured cost of the event of a library frame; reading a clock for each would double it
EVENT_NS = 60  # measured cost of calling a tracer, which the tracer itself cannot time


@cache
def is_library(filename: str) -> bool:
    return filename == "<string>" or _in_library(filename)  # code that a library runs by exec


Trace = Callable[[FrameType, str, Any], Any]
Key = tuple[str, int]  # file and line


class LineTimes:
    """Traces the lines of one thread between `start` and `stop`."""

    def __init__(self, timer: PhaseTimer) -> None:
        self._timer = timer
        self.active = self._paused = False
        self._times: dict[Key, list[float]] = {}  # nanoseconds, number
        self._functions: dict[Key, str] = {}
        self._current: Key | None = None  # the line that is timed now
        self._traced: list[FrameType] = []
        self._global: Trace = self._on_call  # bound once, to compare by identity
        self._local: Trace = self._on_event

    def start(self) -> bool:
        """Start tracing. Returns False if a debugger or a coverage tool is tracing already."""
        if sys.gettrace() is not None:
            return False
        self._num_events = self._num_library = self._num_pauses = 0
        self._paused = False
        self._thread = get_ident()
        self.active = True
        _running.add(self)
        self._trace_stack()
        return True

    def _trace_stack(self) -> None:
        """Trace new calls and the functions on the stack."""
        frame: FrameType | None = sys._getframe(2)
        self._current = self._key(frame)
        while frame is not None:
            if not is_library(frame.f_code.co_filename) and frame.f_trace is None:
                frame.f_trace = self._local
                self._traced.append(frame)
            frame = frame.f_back
        self._last_ns, self._last_own_ns = perf_counter_ns(), self._timer.own_ns
        sys.settrace(self._global)

    def stop(self) -> list[dict[str, Any]]:
        """The slowest lines, slowest first; `num` is a lower bound if tracing paused."""
        if self.active:
            self._add_elapsed(perf_counter_ns())
            self.leave()
        longest = sorted(self._times.items(), key=lambda item: -item[1][0])[:MAX_LINES]
        found = [
            {
                "line": f"{Path(file).name}:{line}", "text": getline(file, line).strip(), "function": self._functions[file, line],
                "num": int(num), "ms": max(0.0, ns) / 1e6,
            }
            for (file, line), (ns, num) in longest
        ]  # fmt: skip
        self._times, self._functions = {}, {}
        return found

    def resume(self) -> None:
        """Resume after a pause when a phase starts. The time since the pause belongs to the line at which tracing paused."""
        if self._paused and self.active and get_ident() == self._thread:
            self._add_elapsed(perf_counter_ns())
            self._current = None
            if self._num_pauses < MAX_PAUSES and sys.gettrace() is None:
                self._paused, self._num_events = False, 0
                self._trace_stack()

    def leave(self) -> None:
        self.active = False
        _running.discard(self)
        is_own_thread = get_ident() == self._thread
        if is_own_thread and sys.gettrace() is self._global:
            sys.settrace(None)
        for frame in self._traced:
            if frame.f_trace is self._local:
                frame.f_trace = None
            if is_own_thread:
                release_locals(frame)
        self._traced.clear()

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Trace | None:
        self._num_library += 1
        if is_library(frame.f_code.co_filename):
            return None
        if not self.active:
            sys.settrace(None)  # the step ended in another thread
            return None
        return self._on_event(frame, event, arg)

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> Trace | None:
        if not self.active:
            return None
        began = perf_counter_ns()
        self._add_elapsed(began)
        if event == "line":
            key = self._current = self._known_key(frame)
            self._times[key][1] += 1
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

    def _add_elapsed(self, now: int) -> None:
        if self._num_library:
            self._timer.own_ns += self._num_library * LIBRARY_NS
            self._num_library = 0
        if self._current is not None:
            self._times[self._current][0] += now - self._last_ns - (self._timer.own_ns - self._last_own_ns)

    def _key(self, frame: FrameType | None) -> Key | None:
        """The current line of the user's code in a frame or its callers."""
        while frame is not None and is_library(frame.f_code.co_filename):
            frame = frame.f_back
        return None if frame is None else self._known_key(frame)

    def _known_key(self, frame: FrameType) -> Key:
        key = (frame.f_code.co_filename, frame.f_lineno)
        if key not in self._times:
            self._functions[key] = frame.f_code.co_name
            self._times[key] = [0.0, 0.0]
        return key


_running: set[LineTimes] = set()


def _stop_in_child() -> None:
    """A worker process forked during the step must not be traced."""
    for times in list(_running):
        times.leave()


os.register_at_fork(after_in_child=_stop_in_child)

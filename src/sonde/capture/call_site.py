"""Which line of the user's own code made a call: the first frame that is in no library."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from sonde.capture.recorder import Journal

_LIBRARIES = tuple(
    {str(Path(__file__).resolve().parents[1])}
    | {str(Path(path)) for key in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_paths().get(key))}
)


@cache
def is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARIES) or filename.startswith("<frozen") or "site-packages" in filename


def user_frame(depth: int = 1) -> FrameType | None:
    """The nearest calling frame in the user's own code, or None (a library trains)."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def called_by_library(frame: FrameType | None) -> FrameType | None:
    """The function of the user's that a library called, from which the code in this frame was called."""
    while frame is not None and frame.f_back is not None and not is_library(frame.f_back.f_code.co_filename):
        frame = frame.f_back
    return frame


def describe_line(frame: FrameType) -> tuple[str, str]:
    """`("train.py:41", "optimizer.step()")`"""
    path = frame.f_code.co_filename
    return f"{Path(path).name}:{frame.f_lineno}", linecache.getline(path, frame.f_lineno).strip()


MAX_LOSSES = 9  # series in one step: what comes after shares the last
MAX_LINES = 1000  # code that is made anew on every call has ever new lines
CHECKED_EVERY = 128  # steps
LINES_LEARNT = 8  # calls of each kind whose line of source is looked up; a loop does not move


class Lines:
    """Notes, once, from which lines of the user's code each kind of call comes."""

    __slots__ = ("__dict__", "__weakref__", "_num_alike", "_num_lookups", "_series")  # see beat.py

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._seen: set[tuple[str, str, int]] = set()
        self._num_lookups: dict[str, int] = {}
        self._series: dict[tuple[str, int], str] = {}  # of the step under way
        self._step = -1
        self._num_alike = 0

    def learn(self, call: str, step: int, **more: Any) -> None:
        num = self._num_lookups.get(call, 0)
        if num < LINES_LEARNT:
            self._num_lookups[call] = num + 1
            self._note(call, step, user_frame(3), more)

    def loss(self, step: int) -> str:
        """The name of the loss whose backward is called now. In a step, each line that calls backward has a series of its own."""
        if step != self._step:
            # One line that calls backward, and always the same: after a while it is believed to go on like that, and only checked at times.
            self._num_alike = self._num_alike + 1 if len(self._series) == 1 else 0
            if self._num_alike > LINES_LEARNT and step % CHECKED_EVERY:
                return "loss"
            self._step = step
            self._series.clear()
        frame = user_frame(3)
        key = (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)  # hashing a code object takes longer than all the rest
        name = self._series.get(key)
        if name is None:
            num = min(len(self._series) + 1, MAX_LOSSES)
            name = self._series[key] = "loss" if num == 1 else f"loss:{num}"
            self._note("backward", step, frame, {"series": name})
        return name

    def _note(self, call: str, step: int, frame: FrameType | None, more: Mapping[str, Any]) -> None:
        key = (call, frame.f_code.co_filename, frame.f_lineno) if frame else (call, "", 0)
        if key not in self._seen and len(self._seen) < MAX_LINES:
            self._seen.add(key)
            if frame is not None:
                line, text = describe_line(frame)
                self._journal.event("source", step, call=call, line=line, text=text, **more)

"""Which line of the user's own code made a call: the first frame that is in no library."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from sonde.capture.journal import Journal

_LIBRARIES = tuple(
    {str(Path(__file__).resolve().parents[1])}
    | {str(Path(path)) for key in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_paths().get(key))}
)


@cache
def _is_library(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith(_LIBRARIES) or name.startswith("<frozen") or "site-packages" in name


def user_frame(depth: int = 1) -> FrameType | None:
    """The nearest calling frame in the user's own code, or None (a library trains)."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and _is_library(frame.f_code):
        frame = frame.f_back
    return frame


def line_of(frame: FrameType) -> tuple[str, str]:
    """`("train.py:41", "optimizer.step()")`"""
    path = frame.f_code.co_filename
    return f"{Path(path).name}:{frame.f_lineno}", linecache.getline(path, frame.f_lineno).strip()


MAX_LOSSES = 9  # series; code that is made anew on every call would make one each time
LINES_LEARNT = 8  # calls of each kind whose line of source is looked up; a loop does not move


class Lines:
    """Notes, once, from which lines of the user's code each kind of call comes."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._names: dict[tuple[str, Any, int], str] = {}
        self._num_lookups: dict[str, int] = {}
        self._num_losses = 0

    def learn(self, call: str, step: int, **more: Any) -> None:
        num = self._num_lookups.get(call, 0)
        if num < LINES_LEARNT:
            self._num_lookups[call] = num + 1
            self._note(call, step, user_frame(3), "", more)

    def loss(self, step: int) -> str:
        """The name of the loss whose backward is being called: each line that calls backward has a series of its own."""
        frame = user_frame(3)
        key = ("backward", frame.f_code, frame.f_lineno) if frame else ("backward", None, 0)
        name = self._names.get(key)
        if name is None:
            self._num_losses += 1
            name = "loss" if self._num_losses == 1 else f"loss:{min(self._num_losses, MAX_LOSSES)}"
            self._note("backward", step, frame, name, {"series": name})
        return name

    def _note(self, call: str, step: int, frame: FrameType | None, name: str, more: Mapping[str, Any]) -> None:
        key = (call, frame.f_code, frame.f_lineno) if frame else (call, None, 0)
        if key not in self._names:
            self._names[key] = name
            if frame is not None:
                line, text = line_of(frame)
                self._journal.event("source", step, call=call, line=line, text=text, **more)

"""Which line of the user's code made a call, and the local variables there."""

import ctypes
import inspect
import linecache
import sys
import sysconfig
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from sonde.capture.run_log_recorder import StepRecorder
from sonde.events import CallSiteFound
from sonde.script_runner import WRAPPER_FILE as WRAPPER_FILE

_SONDE = str(Path(__file__).resolve().parents[1])
_TORCH = str(torch.__path__[0])
_LIBRARIES = tuple(
    {_SONDE} | {str(Path(path)) for key in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_paths().get(key))}
)


@cache
def is_library(filename: str) -> bool:
    """Whether a file belongs to Sonde, to Python or to an installed package."""
    return filename.startswith(_LIBRARIES) or filename.startswith("<frozen") or filename == WRAPPER_FILE or "site-packages" in filename


def user_frame(depth: int = 1) -> FrameType | None:
    """The nearest calling frame in the user's code; None where a library trains."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def called_by_library(frame: FrameType | None) -> FrameType | None:
    """The outermost function of the user's, called by a library, from which the code in this frame was called."""
    while frame is not None and frame.f_back is not None and not is_library(frame.f_back.f_code.co_filename):
        frame = frame.f_back
    return frame


def direct_user_frame(frame: FrameType | None, max_between: int = sys.maxsize) -> FrameType | None:
    """The user's frame that made a call, past at most so many frames of libraries; None where torch or Sonde made the call for purposes of
    its own."""
    while frame is not None and frame.f_code.co_filename in _PATCHES:  # another patch of the same method
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename.startswith(_SONDE):
        return None
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_TORCH) or max_between == 0:
            return None  # an optimizer reads its counter: the user cannot change that
        frame, max_between = frame.f_back, max_between - 1
    return frame


_PATCHES = frozenset(str(Path(__file__).with_name(name)) for name in ("torch_patches.py", "tensor_method_patch.py"))


def describe_line(frame: FrameType | None) -> tuple[str, str]:
    """`("train.py:41", "optimizer.step()")`; two empty texts where there is no frame."""
    if frame is None:
        return "", ""
    path = frame.f_code.co_filename
    return f"{Path(path).name}:{frame.f_lineno}", linecache.getline(path, frame.f_lineno).strip()


# -- local variables -------------------------------------------------------------------------------
# Before Python 3.13, `frame.f_locals` writes the variables of a function into one dictionary that the frame holds. What they refer to then
# lives until the function returns, and the function is somebody's training loop. `locals()` returns the same dictionary: where the user
# holds it (`config = locals()`), it must not change.

_NUM_OWN_REFERENCES = 3  # to the copy: of the frame, of our variable, of the call that counts them
# Offsets of the dictionary, and of the globals to check the layout, in CPython's _PyInterpreterFrame.
_FRAME_LAYOUTS = {(3, 11): (24, 8), (3, 12): (40, 24)}


def read_locals(frame: FrameType) -> dict[str, Any]:
    """The local variables of a running function, without keeping anything alive and without changing what `locals()` gave the user."""
    stored = _stored_locals(frame)
    before = dict(stored) if stored is not None else None
    found = dict(frame.f_locals)
    if before is not None and sys.gettrace() is None:
        held = frame.f_locals
        held.clear()
        held.update(before)
    else:
        release_locals(frame)
    return found


def _stored_locals(frame: FrameType) -> dict[str, Any] | None:
    """The dictionary that the frame holds already, as it is; None if there is none, or if this Python has another layout."""
    layout = _FRAME_LAYOUTS.get(sys.version_info[:2])
    if layout is None or not frame.f_code.co_flags & inspect.CO_OPTIMIZED or sys.implementation.name != "cpython":
        return None
    locals_at, globals_at = layout
    pointer = ctypes.c_void_p.from_address
    inner = pointer(id(frame) + object.__basicsize__ + ctypes.sizeof(ctypes.c_void_p)).value  # after f_back
    if not inner or pointer(inner + globals_at).value != id(frame.f_globals):
        return None
    address = pointer(inner + locals_at).value
    found = ctypes.cast(address, ctypes.py_object).value if address else None
    return found if type(found) is dict else None


def release_locals(frame: FrameType) -> None:
    """Empty the copy that the frame holds, unless the user holds it too (`locals()` returns it). Not to be called while a trace function
    runs: its return would take the empty copy for the variables."""
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED or sys.gettrace() is not None:
        return
    copy = frame.f_locals
    if sys.getrefcount(copy) <= _NUM_OWN_REFERENCES:
        copy.clear()


# -- the lines of the loop -------------------------------------------------------------------------

MAX_LOSSES = 9  # loss series in one step: further lines that call backward share the last
MAX_LINES = 1000  # code that is generated anew for every call has ever new lines
CHECK_INTERVAL = 128  # steps
NUM_LOOKUPS = 8  # calls of each kind whose line is looked up; a loop does not move


class CallSites:
    """Records, once each, the lines of the user's code from which the loop calls torch."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._recorded: set[tuple[str, str, int]] = set()
        self._num_lookups: dict[str, int] = {}
        self._series: dict[tuple[str, int], str] = {}  # loss series of the step by the line that calls backward
        self._series_step = -1
        self._num_single = 0  # steps in a row with one such line

    def learn(self, call: str, step: int, **details: Any) -> None:
        """A call of this kind happens now."""
        num = self._num_lookups.get(call, 0)
        if num < NUM_LOOKUPS:
            self._num_lookups[call] = num + 1
            self._record(call, step, user_frame(2), details)

    def loss_series(self, step: int) -> str:
        """The name of the loss whose backward is called now: each line that calls backward in a step has a series of its own."""
        if step != self._series_step:
            # One line that calls backward, and always the same: after some steps only checked at times.
            self._num_single = self._num_single + 1 if len(self._series) == 1 else 0
            if self._num_single > NUM_LOOKUPS and step % CHECK_INTERVAL:
                return "loss"
            self._series_step = step
            self._series.clear()
        frame = user_frame(2)
        key = (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)
        name = self._series.get(key)
        if name is None:
            num = min(len(self._series) + 1, MAX_LOSSES)
            name = self._series[key] = "loss" if num == 1 else f"loss:{num}"
            self._record("backward", step, frame, {"series": name})
        return name

    def _record(self, call: str, step: int, frame: FrameType | None, details: Mapping[str, Any]) -> None:
        key = (call, frame.f_code.co_filename, frame.f_lineno) if frame else (call, "", 0)
        if key not in self._recorded and len(self._recorded) < MAX_LINES:
            self._recorded.add(key)
            if frame is not None:
                line, text = describe_line(frame)
                self._recorder.emit(CallSiteFound(call=call, line=line, text=text, **details), step)

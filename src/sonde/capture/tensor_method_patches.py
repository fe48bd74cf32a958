"""Methods that all tensors have, listened to for a while and in one thread: `.item()`, `.to()`.

They are inherited from a class of C, which cannot be patched, so what listens is put in front of it and taken out again. Whoever listens
hears of a call when it is over; what goes wrong in him never reaches the caller.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any, NamedTuple

import torch

from sonde.capture.call_site import is_library

_TORCH = str(torch.__path__[0])
_SONDE = str(Path(__file__).resolve().parents[1])
_MISSING = object()


class Call(NamedTuple):
    name: str
    args: tuple[Any, ...]  # the tensor itself is the first
    kwargs: dict[str, Any]
    result: Any  # None where it raised
    ns: int
    frame: FrameType  # that called it


def replace(name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """`make(original)` takes the place of a method of all tensors; what is answered takes it out again."""
    own, made = torch.Tensor.__dict__.get(name, _MISSING), make(getattr(torch.Tensor, name))
    setattr(torch.Tensor, name, made)

    def undo() -> None:
        # Somebody may have put his own in its place meanwhile: then that stays.
        if torch.Tensor.__dict__.get(name) is made:
            if own is _MISSING:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, own)

    return undo


class Listening:
    """To some methods, from `start` to `stop`, in the thread that starts it."""

    def __init__(self, names: Iterable[str], heard: Callable[[Call], None]) -> None:
        self._names, self._heard = tuple(names), heard
        self._undo: list[Callable[[], None]] = []
        self._thread = -1  # nobody's
        self._inside = False
        self._error: Exception | None = None

    def start(self) -> None:
        if not self._undo:
            _listening.append(self)
            self._thread, self._inside, self._error = get_ident(), False, None
            self._undo = [replace(name, self._made(name)) for name in self._names if hasattr(torch.Tensor, name)]

    def stop(self) -> None:
        self._thread = -1
        while self._undo:
            self._undo.pop()()
        if self in _listening:
            _listening.remove(self)

    def check(self) -> None:
        """Raises what went wrong while it listened."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _made(self, name: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                if self._inside or get_ident() != self._thread:
                    return original(*args, **kwargs)
                self._inside = True
                result = None
                began = perf_counter_ns()
                try:
                    result = original(*args, **kwargs)
                    return result
                finally:
                    self._tell(Call(name, args, kwargs, result, perf_counter_ns() - began, sys._getframe(1)))
                    self._inside = False

            wrapper.__name__ = name
            return wrapper

        return make

    def _tell(self, call: Call) -> None:
        try:
            self._heard(call)
        except Exception as error:
            self._error = error.with_traceback(None)  # which would keep the tensors of the call


_listening: list[Listening] = []


def _deaf_in_child() -> None:
    while _listening:
        _listening[-1].stop()  # the last one first: what it stands in front of is in its place again


os.register_at_fork(after_in_child=_deaf_in_child)


def users_frame(frame: FrameType | None, most_between: int = sys.maxsize) -> FrameType | None:
    """Where the user's code made the call, past so many frames of libraries; None where torch or Sonde made it for purposes of its own."""
    while frame is not None and frame.f_code.co_filename == users_frame.__code__.co_filename:  # somebody else listens to the same method
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename.startswith(_SONDE):
        return None
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_TORCH) or most_between == 0:
            return None  # an optimizer reads its counter: that is not in the user's hands
        frame, most_between = frame.f_back, most_between - 1
    return frame

"""Calls back after each call of some methods of tensors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any, NamedTuple

import torch

from sonde.capture.monkeypatch import replace


class MethodCall(NamedTuple):
    """One call of a patched method."""

    name: str
    args: tuple[Any, ...]  # the tensor itself is the first
    kwargs: dict[str, Any]
    result: Any  # None where it raised
    ns: int
    frame: FrameType  # that called it


class TensorMethodPatch:
    """Calls back after each call of some methods of tensors, from `start` to `stop`, in the thread that starts it."""

    def __init__(self, names: Iterable[str], on_call: Callable[[MethodCall], None]) -> None:
        self._names, self._on_call = tuple(names), on_call
        self._undo: list[Callable[[], None]] = []
        self._thread = -1  # no thread
        self._inside = False
        self._error: Exception | None = None

    def start(self) -> None:
        if not self._undo:
            _method_patches.append(self)
            self._thread, self._inside, self._error = get_ident(), False, None
            self._undo = [replace(torch.Tensor, name, self._wrap(name)) for name in self._names if hasattr(torch.Tensor, name)]

    def stop(self) -> None:
        self._thread = -1
        while self._undo:
            self._undo.pop()()
        if self in _method_patches:
            _method_patches.remove(self)

    def check(self) -> None:
        """Raise the last error of the callback."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wrap(self, name: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def method(*args: Any, **kwargs: Any) -> Any:
                if self._inside or get_ident() != self._thread:
                    return original(*args, **kwargs)
                self._inside = True
                result = None
                began = perf_counter_ns()
                try:
                    result = original(*args, **kwargs)
                    return result
                finally:
                    try:
                        self._on_call(MethodCall(name, args, kwargs, result, perf_counter_ns() - began, sys._getframe(1)))
                    except Exception as error:
                        self._error = error.with_traceback(None)  # which would keep the tensors of the call
                    self._inside = False

            method.__name__ = name
            return method

        return make


_method_patches: list[TensorMethodPatch] = []


def _stop_in_child() -> None:
    while _method_patches:
        _method_patches[-1].stop()  # the last one first, so that each finds in its place what it put there


os.register_at_fork(after_in_child=_stop_in_child)

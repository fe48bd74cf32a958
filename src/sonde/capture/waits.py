"""Where Python asks a tensor for its numbers: `.item()`, `.cpu()`, `.tolist()`, `.numpy()`, `float()`, `print`.

On a device each of these waits until everything before it is computed. In the memory of the CPU nothing is waited for, and only the calls
themselves cost. They are listened to during a step that is looked at closely, and then taken out again; a call that a library makes for
its own purposes is not the user's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any, NamedTuple

import torch

from sonde.capture.source import is_library, line_of

NAMES = (
    "item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__", "__repr__", "__format__",
)  # fmt: skip
SPOKEN = {
    "__float__": "float()", "__int__": "int()", "__bool__": "bool()", "__index__": "int()", "__array__": "numpy()", "__repr__": "print",
    "__format__": "print",
}  # fmt: skip
MAX_PLACES = 64
_TORCH = str(torch.__path__[0])
_MISSING = object()


class Wait(NamedTuple):
    line: str
    text: str
    call: str  # ".item()", "print"
    num: int
    ms: float


class Waits:
    """Between `start` and `stop`, in one thread."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._places: dict[tuple[str, int, str], list[Any]] = {}  # nanoseconds, number, how to say it
        self._inside = False

    def start(self) -> None:
        self._thread = get_ident()
        self._places = {}
        for name in NAMES:
            self._listen(name)

    def stop(self) -> list[Wait]:
        while self._undo:
            self._undo.pop()()
        found = [Wait(line, text, call, num, ns / 1e6) for (_, _, call), (ns, num, (line, text)) in self._places.items()]
        self._places = {}
        return sorted(found, key=lambda wait: -wait.ms)

    def _listen(self, name: str) -> None:
        original = getattr(torch.Tensor, name, None)
        if original is None:
            return
        own = torch.Tensor.__dict__.get(name, _MISSING)

        def wrapper(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or get_ident() != self._thread:
                return original(tensor, *args, **kwargs)
            self._inside = True
            began = perf_counter_ns()
            try:
                return original(tensor, *args, **kwargs)
            finally:
                ns = perf_counter_ns() - began
                self._inside = False
                self._note(name, ns, sys._getframe(1))

        wrapper.__name__ = name
        setattr(torch.Tensor, name, wrapper)

        def undo() -> None:
            # Somebody may have put his own in its place meanwhile: then that stays.
            if torch.Tensor.__dict__.get(name) is wrapper:
                if own is _MISSING:
                    delattr(torch.Tensor, name)
                else:
                    setattr(torch.Tensor, name, own)

        self._undo.append(undo)

    def _note(self, name: str, ns: int, frame: FrameType | None) -> None:
        while frame is not None and is_library(frame.f_code.co_filename):
            if frame.f_code.co_filename.startswith(_TORCH):
                return  # an optimizer reads its counter: that is not in the user's hands
            frame = frame.f_back
        if frame is None:
            return
        call = SPOKEN.get(name, f".{name}()")
        key = (frame.f_code.co_filename, frame.f_lineno, call)
        known = self._places.get(key)
        if known is None:
            if len(self._places) >= MAX_PLACES:
                return
            known = self._places[key] = [0, 0, line_of(frame)]
        known[0] += ns
        known[1] += 1

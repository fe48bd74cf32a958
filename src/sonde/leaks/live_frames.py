"""The variables of every function that is running now, in all threads.

The garbage collector does not look into running functions, so whoever asks what holds an object must ask them too. Before Python 3.13
asking leaves a copy of the variables behind in the frame, which would keep the user's tensors alive: it is emptied again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType

_OURS = str(Path(__file__).resolve().parents[1])  # Sonde's own functions hold nothing that would outlive them


def running() -> Iterator[FrameType]:
    """The running functions that are not Sonde's, innermost first."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if not is_ours(at.f_code):
                yield at
            at = at.f_back


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_OURS)


def running_locals() -> dict[int, list[str]]:
    """By id of an object, the variables of running functions that hold it, as `train() local 'history'`."""
    found: dict[int, list[str]] = {}
    for frame in running():
        if frame.f_code.co_flags & CO_OPTIMIZED:  # elsewhere the variables are the module's or the class's
            for name, number in local_ids(frame):
                found.setdefault(number, []).append(f"{called(frame.f_code)} local '{name}'")
    return found


def local_ids(frame: FrameType) -> list[tuple[str, int]]:
    """Names and ids of the variables of a frame; nothing is kept alive by having asked."""
    variables = frame.f_locals
    ids = [(name, id(value)) for name, value in variables.items()]
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
        # Three references are this name, the frame's and the argument's. Any more, and the user holds the copy (`config = locals()`);
        # a tracer would write it back into the variables.
        if sys.getrefcount(variables) <= 3 and frame.f_trace is None and sys.gettrace() is None:
            variables.clear()
    return ids


def called(code: CodeType) -> str:
    """`train()`, `Trainer.fit()`."""
    name = code.co_qualname.rpartition("<locals>.")[2]
    return name if name.startswith("<") else f"{name}()"

"""The local variables of every running function, in all threads.

The garbage collector does not report the variables of running functions as referrers, so they are read here.
"""

import sys
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType

from sonde.capture.user_source_line import read_locals

_SONDE = str(Path(__file__).resolve().parents[1])


def user_frames() -> Iterator[FrameType]:
    """The frames of running functions outside of Sonde, innermost first. Sonde's own hold nothing that outlives them."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if not is_sonde_code(at.f_code):
                yield at
            at = at.f_back


def is_sonde_code(code: CodeType) -> bool:
    return code.co_filename.startswith(_SONDE)


def running_locals() -> dict[int, list[str]]:
    """By id of an object, the variables of running functions that refer to it, as `train() local 'history'`."""
    found: dict[int, list[str]] = {}
    for frame in user_frames():
        if frame.f_code.co_flags & CO_OPTIMIZED:  # otherwise the locals are those of a module or a class
            for name, object_id in local_ids(frame):
                found.setdefault(object_id, []).append(f"{function_name(frame.f_code)} local '{name}'")
    return found


def local_ids(frame: FrameType) -> list[tuple[str, int]]:
    """Names and ids of the local variables of a frame; the call keeps none of them alive."""
    return [(name, id(value)) for name, value in read_locals(frame).items()]


def function_name(code: CodeType) -> str:
    """`train()`, `Trainer.fit()`."""
    name = code.co_qualname.rpartition("<locals>.")[2]
    return name if name.startswith("<") else f"{name}()"

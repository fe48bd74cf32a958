"""The variables of a function that is running, read without keeping anything alive.

Before Python 3.13, whoever asks a frame for its variables, or traces it, leaves a copy of them with the frame: what they refer to then
lives until the function returns, and the function is somebody's training loop.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

_NOBODY_ELSE = 3  # references to the copy: of the frame, of our variable, of the call that counts them


def variables(frame: FrameType) -> dict[str, Any]:
    """By name, as they are now."""
    found = dict(frame.f_locals)
    release_locals(frame)
    return found


def release_locals(frame: FrameType) -> None:
    """Empties the copy that the frame holds, unless the user holds it too: `locals()` gives it to him. Not to be called while a trace
    function runs: its return would take the empty copy for the variables."""
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED or sys.gettrace() is not None:
        return
    copy = frame.f_locals
    if sys.getrefcount(copy) <= _NOBODY_ELSE:
        copy.clear()

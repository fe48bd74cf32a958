"""Call sites in the user's code. The key of a call site is the same in every process that runs the same script."""

from __future__ import annotations

import os

from sonde.capture.call_site import describe_line, user_frame
from sonde.tuning.trial_messages import CallSite

LIBRARY = CallSite("library", "in a library", "")


def call_site_here() -> CallSite:
    """The innermost line of the user's code on the stack; `LIBRARY` if there is none."""
    frame = user_frame(2)
    if frame is None:
        return LIBRARY
    line, text = describe_line(frame)
    return CallSite(f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}", line, text)

"""Where in the user's code something is made or called. A key is the same in every process that runs the same script."""

from __future__ import annotations

import os

from sonde.capture.call_site import describe_line, user_frame
from sonde.tuning.messages import Place

LIBRARY = Place("library", "in a library", "")


def place_here() -> Place:
    """The nearest line of the user's own code that led to this call."""
    frame = user_frame(2)
    if frame is None:
        return LIBRARY
    line, text = describe_line(frame)
    return Place(f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}", line, text)

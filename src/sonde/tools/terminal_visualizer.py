"""Pictures in the terminal where the training runs: over ssh, in a log file, in the debugger's prompt."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sonde.errors import SondeError
from sonde.views import textplots
from sonde.views.textplots import Paper

NARROWEST, LOWEST = 20, 6  # characters and rows: in less there is room for labels alone
PROBE = "⣿█✗│░"  # a terminal that can show these can show all of it


class TerminalVisualizer:
    """Draws into strings of at most `width` by about `height` characters.

    Braille and block characters are used where standard output can encode them (`unicode` says otherwise), and red for what is
    not finite where standard output is a terminal that wants colours (`colour` says otherwise; NO_COLOR is respected).
    """

    def __init__(self, width: int = 80, height: int = 24, *, unicode: bool | None = None, colour: bool | None = None) -> None:
        for name, given, least in (("width", width, NARROWEST), ("height", height, LOWEST)):
            if isinstance(given, bool) or not isinstance(given, int) or given < least:
                raise SondeError(f"{name}={given!r}: a drawing needs at least {least}. Use TerminalVisualizer(width=80, height=24).")
        self.width, self.height = width, height
        self._unicode, self._colour = unicode, colour

    def ascii_histogram(self, values: Any, bins: int = 16) -> str:
        """How often which value occurs; NaN and the infinities have bars of their own."""
        return textplots.histogram(values, bins, self._paper())

    def ascii_line_plot(self, x: Any, y: Any, title: str = "") -> str:
        """A curve, on a logarithmic axis where its values span decades; NaN and the infinities are marked at the edge."""
        return textplots.line_plot(x, y, title, self._paper())

    def heatmap(self, matrix: Any, names: Sequence[str] | None = None) -> str:
        """A shade for each number: rows are layers (or units), columns are steps (or positions)."""
        return textplots.heatmap(matrix, names, self._paper())

    def layer_table(self, rows: Mapping[str, Mapping[str, float]]) -> str:
        """A line for each layer: `layer_table({"encoder.0": {"mean": 0.1, "std": 1.0}})`."""
        return textplots.layer_table(rows, self._paper())

    def _paper(self) -> Paper:
        # Asked for each drawing: standard output may have been replaced since this was made.
        unicode = _can_show(PROBE) if self._unicode is None else self._unicode
        colour = _wants_colour() if self._colour is None else self._colour
        return Paper(self.width, self.height, unicode=unicode, colour=colour)


def _can_show(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _wants_colour() -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):  # replaced by something else, or closed
        return False

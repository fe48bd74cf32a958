"""TerminalVisualizer: plots as text, for a terminal over ssh, a log file or a debugger prompt."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sonde.errors import require_count
from sonde.render.terminal import text_plots as textplots
from sonde.render.terminal.text_plots import PlotArea

MIN_WIDTH, MIN_HEIGHT = 20, 6  # characters and rows: less leaves space for labels only
SAMPLE_CHARACTERS = "⣿█✗│░"  # an encoding with these has all characters of the plots


class TerminalVisualizer:
    """Draws plots as strings of at most `width` by about `height` characters. `unicode` and `colour` turn Braille characters and red for
    non-finite values on or off. By default Braille is used if standard output can encode it, and red if standard output is a terminal and
    NO_COLOR is not set."""

    def __init__(self, width: int = 80, height: int = 24, *, unicode: bool | None = None, colour: bool | None = None) -> None:
        self.width, self.height = require_count(width, "width", minimum=MIN_WIDTH), require_count(height, "height", minimum=MIN_HEIGHT)
        self._unicode, self._colour = unicode, colour

    def ascii_histogram(self, values: Any, bins: int = 16) -> str:
        """A histogram; NaN and the infinities have separate bars."""
        return textplots.histogram(values, bins, self._canvas())

    def ascii_line_plot(self, x: Any, y: Any, title: str = "") -> str:
        """A curve, on a logarithmic axis if its values span decades; NaN and the infinities are marked at the edge."""
        return textplots.line_plot(x, y, title, self._canvas())

    def heatmap(self, matrix: Any, names: Sequence[str] | None = None) -> str:
        """A heat map: rows are layers (or units), columns are steps (or positions)."""
        return textplots.heatmap(matrix, names, self._canvas())

    def layer_table(self, rows: Mapping[str, Mapping[str, float]]) -> str:
        """A table with one line per layer: `layer_table({"encoder.0": {"mean": 0.1, "std": 1.0}})`."""
        return textplots.layer_table(rows, self._canvas())

    def _canvas(self) -> PlotArea:
        # Checked for each plot: standard output may have been replaced since.
        unicode = _can_encode(SAMPLE_CHARACTERS) if self._unicode is None else self._unicode
        colour = _supports_color() if self._colour is None else self._colour
        return PlotArea(self.width, self.height, unicode=unicode, color=colour)


def _can_encode(text: str) -> bool:
    with suppress(UnicodeEncodeError, LookupError):
        return bool(text.encode(getattr(sys.stdout, "encoding", None) or "ascii"))
    return False


def _supports_color() -> bool:
    with suppress(AttributeError, ValueError):  # replaced by another object, or closed
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return False

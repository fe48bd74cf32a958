"""Plots made of characters: histogram, line plot, heat map, table. No line is wider than the area; non-finite values are drawn."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.cells import cell_len, set_cell_size

from sonde.errors import SondeError
from sonde.formatting import counted, number, printable
from sonde.render.axis_ticks import curve_axis, even_labels, linear_axis, row_labels, spread_axis
from sonde.render.plots.arrays_to_plot import Floats, coarse, non_finite, one_row, steps_for, two_dimensional
from sonde.render.plots.histogram_plots import Histogram, binned, is_steep
from sonde.render.terminal.braille_canvas import BrailleCanvas
from sonde.render.terminal.sparkline import ASCII_MARKS, MARKS, bar

SHADES, ASCII_SHADES = "·░▒▓█", ".-=+*#@"
RED, PLAIN = "\x1b[31m", "\x1b[0m"
WIDEST_CELL = 6  # characters: beyond that a heat map with few columns gets no clearer
SHORTEST_BAR = 4  # characters: rather no counts than shorter bars
ROOM = 5  # rows of a drawing that are not the drawing: title, axis, labels, counts


@dataclass(frozen=True, slots=True)
class PlotArea:
    """The size of a plot in characters, and what the terminal can show."""

    width: int = 80
    height: int = 24
    unicode: bool = True
    color: bool = False

    def text(self, given: object, width: int | None = None) -> str:
        """Untrusted text in at most `width` cells; a wide character takes two."""
        string = printable(given)
        if not self.unicode:
            string = string.encode("ascii", "backslashreplace").decode()
        width = self.width if width is None else width
        if cell_len(string) <= width:
            return string
        return set_cell_size(string, max(width - 1, 0)).rstrip() + self.choose("…", "~") if width > 0 else ""

    def choose(self, fine: str, plain: str) -> str:
        return fine if self.unicode else plain

    def mark(self, value: float | str) -> str:
        """The sign of a non-finite number."""
        return (MARKS if self.unicode else ASCII_MARKS)[str(float(value))]

    def red(self, text: str) -> str:
        return f"{RED}{text}{PLAIN}" if self.color and text else text

    def counts(self, bad: Mapping[str, int]) -> list[str]:
        """A line with the meaning and the number of each mark; none where all values are finite."""
        counts = "  ".join(f"{self.mark(name)} {count:,} {name}" for name, count in bad.items())
        return [self.red(self.text(counts))] if bad else []


def histogram(values: Any, bins: int, area: PlotArea) -> str:
    """A bar for each bin, from the lowest to the highest value, then a bar for each kind of value that is not finite."""
    found = binned(values, bins)
    if not found.num:
        return area.text("no values")
    rows = area.height - 1 - (len(found.bad) + 1 if found.bad else 0)
    if len(found.counts) > rows:
        found = binned(values, max(rows - 1, 2))
    labels = _bin_labels(found)
    heights = [*found.counts.tolist(), *map(float, found.bad.values())]
    counts = [f"{int(height):,}" for height in heights]
    steep = is_steep(np.array(heights))
    left = min(max(map(len, [*labels, *found.bad]), default=0), 9)
    right = max(map(len, counts)) + 1
    if area.width - left - 2 - right < SHORTEST_BAR:
        counts, right = [""] * len(counts), 0
    room = area.width - left - 2 - right
    lengths = np.log10(1 + np.array(heights)) if steep else np.array(heights)
    lines = []
    for label, share, count in zip([*labels, *found.bad], (lengths / lengths.max()).tolist(), counts):
        drawn = bar(share, room, ascii_only=not area.unicode)
        if label in found.bad:
            drawn = area.red(area.mark(label) * max(round(share * room), 1))
            label = label.replace("Infinity", "Inf")
        lines.append(f"{label[:left]:>{left}} {area.choose('│', '|')}{drawn} {count}".rstrip())
    note = counted(found.num, "value") + (f", {found.note}" if found.note else "") + (", bars logarithmic" if steep else "")
    lines.append(area.text(note))
    if len(found.counts) < bins and not found.whole and found.note:
        lines.append(area.text(f"{len(found.counts)} bins: {bins} have no room in {area.height} rows"))
    return "\n".join([*lines, *area.counts(found.bad)])


def line_plot(x: Any, y: Any, title: str, area: PlotArea) -> str:
    """One curve; where a value is not finite the curve breaks and a mark is at the edge."""
    values = one_row(y, "y")
    places = steps_for(x, values.size, "y")
    head = [area.text(title)] if title else []
    if not values.size:
        return "\n".join([*head, area.text("no values")])
    order = np.argsort(places, kind="stable")
    places, values = places[order], values[order]
    across, up = linear_axis(places[0], places[-1]), curve_axis(values)
    num_rows = max(area.height - ROOM, 3)
    shown = up.ticks(max(num_rows // 2, 2)) if np.isfinite(values).any() else []
    ticks = {round((1 - place) * (num_rows - 1)): text for place, text in shown}
    left = min(max(map(len, ticks.values()), default=0), 9)
    canvas = BrailleCanvas(area.width - left - 1, num_rows, unicode=area.unicode)
    _curve(canvas, across.place(places), up.place(values))
    bad = np.flatnonzero(~np.isfinite(values))[::-1]  # backwards: where two share a place, the first of them is shown
    for column, value in zip(np.rint(across.place(places[bad]) * (canvas.width - 1)).astype(int).tolist(), values[bad].tolist()):
        canvas.mark(column, canvas.height - 1 if value == -math.inf else 0, area.red(area.mark(value)))
    lines = []
    for row, drawn in enumerate(canvas.rows()):
        tick = row in ticks
        side = area.choose("┤" if tick else "│", "+" if tick else "|")
        lines.append(f"{ticks.get(row, '')[:left]:>{left}}{side}{drawn}".rstrip())
    lines.append(" " * left + area.choose("└", "+") + area.choose("─", "-") * canvas.width)
    lines.append(" " * (left + 1) + _ends(f"{places[0]:g}", f"{places[-1]:g}", canvas.width))
    scale = [] if up.scale == "linear" else [area.text(f"vertical axis: {up.scale}")]
    return "\n".join([*head, *lines, *scale, *area.counts(non_finite(values))])


def heatmap(matrix: Any, names: Sequence[str] | None, area: PlotArea) -> str:
    """A shade for each cell: light is low, dark is high. Where there are too many cells, neighbours share one."""
    values = two_dimensional(matrix, "values")
    if not values.size:
        return area.text("no values")
    if names is not None and (isinstance(names, str) or not isinstance(names, Iterable)):
        raise SondeError(f"names must be a list of names, one per row, not {names!r}.")
    rows = [str(name) for name in names] if names is not None else [str(row) for row in range(values.shape[0])]
    if len(rows) != values.shape[0]:
        raise SondeError(f"{len(rows)} names but {values.shape[0]} rows. Give one name per row.")
    num_rows = min(values.shape[0], max(area.height - 3, 2))
    labels = _labels(rows, num_rows, area)
    left = min(max(map(cell_len, labels), default=0), area.width // 2)
    room = max(area.width - left - 1, 1)
    cells = coarse(values, num_rows, room)
    wide = max(min(room // cells.shape[1], WIDEST_CELL), 1)
    axis = curve_axis(values) if np.nanmin(np.where(np.isfinite(values), values, np.inf)) >= 0 else spread_axis(values)
    shades = SHADES if area.unicode else ASCII_SHADES
    lines = []
    for label, row, shares in zip(labels, cells.tolist(), axis.place(cells).tolist()):
        drawn = "".join(
            shades[min(int(share * len(shades)), len(shades) - 1)] * wide if math.isfinite(cell) else area.red(area.mark(cell) * wide)
            for cell, share in zip(row, shares)
        )
        lines.append(set_cell_size(area.text(label, left), left) + " " + drawn)
    finite = values[np.isfinite(values)]
    if finite.size:
        low, high = number(float(finite.min())), number(float(finite.max()))
        lines.append(area.text(f"{shades[0]} {low} {area.choose('…', 'to')} {shades[-1]} {high}" + axis.scale_note))
    return "\n".join([*lines, *area.counts(non_finite(values))])


def _cell(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise SondeError(f"{what} must be one number, not {value!r}.") from None


def layer_table(rows: Mapping[str, Mapping[str, float]], area: PlotArea) -> str:
    """A line for each layer, a column for each number. Columns that have no room are named below."""
    if not isinstance(rows, Mapping) or not all(isinstance(row, Mapping) for row in rows.values()):
        raise SondeError('rows must be a mapping from layers to their numbers by name, for instance {"encoder.0": {"mean": 0.1}}.')
    if not rows:
        return area.text("no layers")
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = {
        column: [number(_cell(row[column], f"{column} of {name}")) if column in row else "" for name, row in rows.items()]
        for column in columns
    }
    wide = {column: max(cell_len(area.text(column)), *map(len, cells[column])) + 2 for column in columns}
    left = min(max(cell_len(area.text(name, 200)) for name in rows), max(area.width // 2, area.width - sum(wide.values())))
    shown: list[str] = []
    for column in columns:
        if left + sum(wide[each] for each in (*shown, column)) <= area.width:
            shown.append(column)
    head = " " * left + "".join(" " * (wide[column] - cell_len(area.text(column))) + area.text(column) for column in shown)
    lines = [head.rstrip(), area.choose("─", "-") * cell_len(head)]
    for index, name in enumerate(rows):
        line = set_cell_size(area.text(name, left), left)
        for column in shown:
            cell = f"{cells[column][index]:>{wide[column]}}"
            line += area.red(cell) if "NaN" in cell or "Inf" in cell else cell
        lines.append(line.rstrip())
    hidden = [column for column in columns if column not in shown]
    return "\n".join([*lines, *([area.text(f"no room for: {', '.join(hidden)}")] if hidden else [])])


def _bin_labels(found: Histogram) -> list[str]:
    """The lower end of each bin, or the number that it is for."""
    edges = found.edges[:-1].tolist()
    if found.whole:
        return [number(edge + 0.5) for edge in edges]
    return even_labels(edges, extra=1) if found.axis.scale == "linear" else [number(edge) for edge in edges]


def _curve(canvas: BrailleCanvas, x: Floats, y: Floats) -> None:
    """Each column of dots from its lowest to its highest value, joined to the column before unless a bad value lies between."""
    finite = np.flatnonzero(np.isfinite(y))
    columns = np.rint(x[finite] * (canvas.num_x - 1)).astype(int)
    rows = np.rint((1 - np.clip(y[finite], 0, 1)) * (canvas.num_y - 1)).astype(int)
    starts = np.flatnonzero(np.diff(columns, prepend=-1)).tolist()
    for start, end in zip(starts, [*starts[1:], len(columns)]):
        column = int(columns[start])
        canvas.line(column, int(rows[start:end].min()), column, int(rows[start:end].max()))
        if start and finite[start] == finite[start - 1] + 1:
            canvas.line(int(columns[start - 1]), int(rows[start - 1]), column, int(rows[start]))


def _ends(first: str, last: str, width: int) -> str:
    """Both ends of the horizontal axis; one alone where two have no room, since half a number is a wrong number."""
    if first == last or len(first) + len(last) >= width:
        return first if len(first) <= width else ""
    return first + last.rjust(width - len(first))


def _labels(names: Sequence[str], num_rows: int, area: PlotArea) -> list[str]:
    """A label for each drawn row, empty where it belongs to the module above."""
    if len(names) == num_rows:
        return [area.text(name) for name in names]
    labels = [""] * num_rows
    for label in row_labels(names, num_rows):
        row = min(label.first * num_rows // len(names), num_rows - 1)
        labels[row] = labels[row] or area.text(label.text)
    return labels

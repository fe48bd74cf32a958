"""Many distributions side by side: a small histogram each, or a row of quantiles each where there are too many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.views.axis import spread_axis
from sonde.views.numbers import counted
from sonde.views.plots import ink
from sonde.views.plots.distribution import QUANTILES, Histogram, bars, binned
from sonde.views.plots.heat import row_ticks
from sonde.views.plots.plot import Plot
from sonde.views.plots.values import Floats, bad_text, place_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_HISTOGRAMS = 24
COLUMNS = 4
BARS_UP_TO = 100  # rows: beyond that the gaps between bars would be finer than the dots of a picture


def histograms(values_by_name: Mapping[str, Any], *, name: str, bins: int = 64) -> Plot:
    """The distribution of each of these values, from three layers to thousands."""
    each = {str(layer): binned(values, bins, what=str(layer)) for layer, values in values_by_name.items()}
    data = {"kind": "histograms", "distributions": {layer: histogram.data() for layer, histogram in each.items()}}
    num = len(each)
    if num <= MOST_HISTOGRAMS:
        rows = -(-max(num, 1) // COLUMNS)
        return Plot(name, lambda figure: _grid(figure, name, each), data=data, size=(7.2, 0.8 + 1.35 * rows))
    high = min(1.6 + 0.11 * num, 9.0)
    return Plot(name, lambda figure: _rows(figure, name, each, high), data=data, size=(6.8, high))


def _heading(figure: Figure, name: str, each: Mapping[str, Histogram], how: str) -> None:
    bad = {layer: histogram.bad for layer, histogram in each.items() if histogram.bad}
    total: dict[str, int] = {}
    for counts in bad.values():
        total = {kind: total.get(kind, 0) + counts.get(kind, 0) for kind in {**total, **counts}}
    warning = f"{bad_text(total)} {place_text(list(bad))}" if bad else ""
    ink.heading(figure, name, f"{counted(len(each), 'layer')}; {how}", warning)


def _grid(figure: Figure, name: str, each: Mapping[str, Histogram]) -> None:
    _heading(figure, name, each, "each on its own axis, bars as shares of the highest")
    if not each:
        ink.say(figure.add_subplot(), "no layers")
        return
    rows = -(-len(each) // COLUMNS)
    columns = min(COLUMNS, len(each))
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (layer, histogram) in zip(grid, each.items()):
        _small(axes, layer, histogram)
    for axes in grid[len(each) :]:
        axes.set_axis_off()


def _small(axes: Axes, layer: str, histogram: Histogram) -> None:
    axes.set_title(ink.safe(layer, 30), fontsize=7, loc="left", color=ink.BAD if histogram.bad else ink.INK, pad=3, parse_math=False)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    if not histogram.note:
        ink.say(axes, bad_text(histogram.bad) or "no values")
        return
    bars(axes, histogram.counts / histogram.counts.max(), ink.BLUE, apart=histogram.whole)
    ink.draw_axis(axes, "x", histogram.axis, "", limit=5, whole=histogram.whole)
    axes.tick_params(labelsize=ink.TINY)
    if histogram.bad:
        text = bad_text(histogram.bad)
        axes.text(0.99, 0.97, text, transform=axes.transAxes, ha="right", va="top", fontsize=ink.TINY, color=ink.BAD)


def _rows(figure: Figure, name: str, each: Mapping[str, Histogram], high: float) -> None:
    """Five quantiles for each layer, one row each, on one axis."""
    _heading(figure, name, each, "median, middle 50 % and 90 % of each")
    axes = figure.add_subplot()
    known = {row: histogram for row, histogram in enumerate(each.values()) if histogram.note}
    rows = np.array(list(known))
    table = np.array([histogram.quantiles for histogram in known.values()]).reshape(-1, len(QUANTILES))
    axis = spread_axis(table.ravel())
    places = axis.place(table)
    ink.grid(axes, "x")
    for low, high_share, colour in ((0, 4, ink.SKY), (1, 3, ink.BLUE)):
        left, right = places[:, low], places[:, high_share]
        if len(each) <= BARS_UP_TO:
            axes.barh(rows, right - left, 0.8, left, color=colour, linewidth=0)
        else:
            _outline(axes, rows, left, right, colour)
    axes.vlines(places[:, 2], rows - 0.5, rows + 0.5, colors=ink.INK, linewidth=0.9)
    bad = [row for row, histogram in enumerate(each.values()) if histogram.bad]
    if bad:  # even an empty line takes room
        axes.plot([1.0] * len(bad), bad, linestyle="none", marker="x", markersize=4, color=ink.BAD, clip_on=False)
    ink.draw_axis(axes, "x", axis, "value" + ("" if axis.scale == "linear" else f" ({axis.scale})"), limit=8)
    axes.set_ylim(len(each) - 0.5, -0.5)
    row_ticks(axes, list(each), high)


def _outline(axes: Axes, rows: Any, left: Floats, right: Floats, colour: str) -> None:
    """All bars as one area; rows that are not there leave a gap."""
    heights = np.repeat(rows, 2) + np.tile([-0.5, 0.5], len(rows))
    breaks = np.flatnonzero(np.diff(rows) > 1) * 2 + 2
    pieces = [np.split(each, breaks) for each in (heights, np.repeat(left, 2), np.repeat(right, 2))]
    for height, low, high in zip(*pieces):
        axes.fill_betweenx(height, low, high, color=colour, linewidth=0)



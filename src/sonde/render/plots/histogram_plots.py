"""Histograms: of one distribution, or of many side by side. Non-finite values have bars of their own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sonde.errors import SondeError
from sonde.formatting import counted, number
from sonde.render.axis_ticks import LARGEST, Axis, linear_axis, spread_axis
from sonde.render.plots import style
from sonde.render.plots.arrays_to_plot import Floats, bad_text, non_finite, percentile, place_text, plain_array, range_text
from sonde.render.plots.heatmap_plot import row_ticks
from sonde.render.plots.plot import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
MOST_BINS = 100_000
LOWEST = 1e-9  # bottom of the bars: zero, as far as a logarithmic axis can show it
MOST_HISTOGRAMS = 96  # a larger figure would be more than a page
COLUMNS, MANY_COLUMNS = 4, 6  # histograms beside each other; many from MANY on
MANY = 25
LONGEST_LINE = 30  # characters of a title that fit above a histogram
BARS_UP_TO = 100  # rows: beyond that the gaps between bars would be finer than the pixels of a plot
PEAK = 50.0  # times the median bar: then the other bars could not be seen beside the highest


class Histogram(NamedTuple):
    """Counts of values between edges, on the axis that the values ask for."""

    axis: Axis
    edges: Floats
    counts: Floats
    bad: dict[str, int]
    num: int
    note: str  # "-1 to 1"; empty where nothing is finite
    quantiles: tuple[float, ...]
    whole: bool = False  # a bar for each whole number

    def data(self) -> dict[str, Any]:
        """What is drawn, for JSON."""
        return {
            "num_values": self.num, "non_finite": self.bad, "scale": self.axis.scale, "edges": self.edges.tolist(),
            "counts": self.counts.astype(int).tolist(), "quantiles": dict(zip(map(str, QUANTILES), self.quantiles)),
        }  # fmt: skip


def binned(values: Any, bins: int, axis: Axis | None = None, what: str = "values") -> Histogram:
    """The histogram of any values; on `axis` where several are to be compared."""
    if isinstance(bins, bool) or not isinstance(bins, (int, np.integer)) or not 1 <= bins <= MOST_BINS:
        raise SondeError(f"bins={bins!r}: a histogram needs a whole number of bins from 1 to {MOST_BINS:,}, for example bins=64.")
    given = plain_array(values, what).reshape(-1)
    numbers = given.astype(np.float64, copy=False)
    finite, whole, bad = numbers[np.isfinite(numbers)], False, non_finite(numbers)
    if not finite.size:
        return Histogram(axis or Axis("linear", 0.0, 1.0), np.zeros(0), np.zeros(0), bad, numbers.size, "", ())
    if axis is None and given.dtype.kind in "bui" and finite.max() - finite.min() < bins:
        # Few whole numbers: a bar for each, rather than bins that hold two of them here and none there.
        low, high = finite.min() - 0.5, finite.max() + 0.5
        axis, bins, whole = linear_axis(low, high), int(high - low), True
    elif axis is None and finite.min() == finite.max():
        around = linear_axis(finite[0], finite[0])
        half = (around.high / 2 - around.low / 2) / bins if bins % 2 == 0 else 0.0
        axis = Axis("linear", around.low + half, min(around.high + half, LARGEST))  # so that the one bar has its value in the middle
    axis = axis or spread_axis(finite)
    counts, edges = np.histogram(np.clip(axis.place(finite), 0.0, 1.0), bins=bins, range=(0.0, 1.0))
    places = [(finite.size - 1) * share for share in QUANTILES]
    ordered = np.partition(finite, sorted({rank for place in places for rank in (math.floor(place), math.ceil(place))}))
    quantiles = tuple(percentile(ordered, 100 * share) for share in QUANTILES)
    return Histogram(axis, axis.values(edges), counts.astype(np.float64), bad, numbers.size, range_text(finite), quantiles, whole)


def is_steep(counts: Floats) -> bool:
    """Whether bars of these heights are to be drawn on a logarithmic axis."""
    filled = counts[counts > 0]
    return bool(filled.size) and bool(filled.max() > PEAK * np.median(filled))


def distribution(values: Any, *, name: str = "values", bins: int = 64, unit: str = "") -> Plot:
    """A histogram of any values, with the median and the middle 90 % marked."""
    histogram = binned(values, bins, what=name)
    data = {"kind": "distribution", "unit": unit, **histogram.data()}
    return Plot(name, lambda figure: _distribution(figure, name, histogram, unit), data=data)


def _distribution(figure: Figure, name: str, histogram: Histogram, unit: str) -> None:
    notes = counted(histogram.num, "value")
    if histogram.note:
        notes += f", {histogram.note}; median {number(histogram.quantiles[2])} (dashed), the middle 90 % darker"
    style.heading(figure, name, notes, bad_text(histogram.bad))
    columns = len(histogram.bad)
    if not histogram.note and not columns:
        style.show_message(figure.add_subplot(), "no values")
        return
    parts = figure.subplots(1, 2 if columns else 1, width_ratios=[16, 1.3 * columns] if columns else None, squeeze=False)[0]
    heights = np.concatenate([histogram.counts, np.array(list(histogram.bad.values()), np.float64)])
    steep = is_steep(heights)
    if histogram.note:
        _bars(parts[0], histogram, unit, steep)
        _count_axis(parts[0], heights.max(), steep)
    else:
        style.show_message(parts[0], "no finite value")
    if columns:
        _count_axis(parts[1], heights.max(), steep)
        _bad_bars(parts[1], histogram.bad, labelled=not histogram.note)


def _bars(axes: Axes, histogram: Histogram, unit: str, steep: bool) -> None:
    edges = np.linspace(0.0, 1.0, len(histogram.counts) + 1)
    low, _, median, _, high = histogram.axis.place(histogram.quantiles).tolist()
    middle = (edges[1:] > low - 1e-12) & (edges[:-1] < high + 1e-12)
    for chosen, color in ((middle, style.BLUE), (~middle, style.SKY)):
        bars(axes, np.where(chosen, histogram.counts, 0.0), color, apart=histogram.whole)
    axes.axvline(median, color=style.TEXT, linewidth=0.9, linestyle=(0, (4, 2)))
    label = "value" + (f" [{unit}]" if unit else "") + histogram.axis.scale_note
    style.draw_axis(axes, "x", histogram.axis, label, limit=8, whole=histogram.whole)
    axes.set_ylabel("number of values" + (" (log)" if steep else ""))


def bars(axes: Axes, heights: Floats, color: str, *, apart: bool = False) -> None:
    """Bars side by side from 0 to 1; `apart` leaves gaps."""
    edges = np.linspace(0.0, 1.0, len(heights) + 1)
    if apart:
        axes.bar((edges[1:] + edges[:-1]) / 2, heights, 0.9 / len(heights), color=color, linewidth=0)
    else:
        # One outline for all: between rectangles a viewer of vector graphics shows hairlines.
        axes.stairs(heights, edges, baseline=LOWEST, fill=True, color=color, linewidth=0)


def _bad_bars(axes: Axes, bad: dict[str, int], *, labelled: bool) -> None:
    axes.bar(range(len(bad)), list(bad.values()), 0.7, facecolor=style.BACKGROUND, edgecolor=style.BAD, hatch="////", linewidth=0.8)
    labels = [name.replace("Infinity", "Inf").replace("-", "−") for name in bad]
    axes.set_xticks(range(len(bad)), labels=labels, color=style.BAD)
    axes.set_xlim(-0.6, len(bad) - 0.4)
    options: Any = {"textcoords": "offset points", "ha": "center", "fontsize": style.TINY, "color": style.BAD}
    for place, count in enumerate(bad.values()):
        axes.annotate(f"{count:,}", (place, count), (0, 2), **options)
    if labelled:
        axes.set_ylabel("number of values")
    else:
        axes.tick_params(axis="y", labelleft=False)


def _count_axis(axes: Axes, highest: float, steep: bool) -> None:
    style.grid(axes, "y")
    if steep:
        axes.set_yscale("log")
        axes.set_ylim(0.7, highest * 1.6)
    else:
        axes.set_ylim(0, highest * 1.08)
        axes.yaxis.set_major_locator(style.whole_number_ticks(5))


def histograms(values_by_name: Mapping[str, Any], *, name: str, bins: int = 64, kind: str = "layer") -> Plot:
    """The distribution of each of these values, from three layers to thousands. `kind` is what one of them is called."""
    each = {str(layer): binned(values, _bins_for(values, bins), what=str(layer)) for layer, values in values_by_name.items()}
    data = {"kind": "histograms", "distributions": {layer: histogram.data() for layer, histogram in each.items()}}
    num = len(each)
    if num <= MOST_HISTOGRAMS:
        columns = COLUMNS if num < MANY else MANY_COLUMNS
        rows = -(-max(num, 1) // columns)
        return Plot(name, lambda figure: _grid(figure, name, each, columns, kind), data=data, size=(1.8 * columns, 0.8 + 1.35 * rows))
    high = min(1.6 + 0.11 * num, 9.0)
    return Plot(name, lambda figure: _quantile_rows(figure, name, each, high, kind), data=data, size=(6.8, high))


def _bins_for(values: Any, bins: int) -> int:
    """At most `bins`, and fewer for few values: 32 values in 64 bins are a comb."""
    num = values.numel() if hasattr(values, "numel") else np.size(values)
    return min(bins, max(num // 4, 8)) if type(bins) is int and bins <= MOST_BINS else bins


def _grid_heading(figure: Figure, name: str, each: Mapping[str, Histogram], kind: str, how: str) -> None:
    bad = [layer for layer, histogram in each.items() if histogram.bad]
    total = sum((Counter(histogram.bad) for histogram in each.values()), Counter())
    warning = f"{bad_text(total)} {place_text(bad, kind)}" if bad else ""
    style.heading(figure, name, f"{counted(len(each), kind)}; {how}", warning)


def _grid(figure: Figure, name: str, each: Mapping[str, Histogram], columns: int, kind: str) -> None:
    _grid_heading(figure, name, each, kind, "each on its own axis, bars as shares of the highest")
    if not each:
        style.show_message(figure.add_subplot(), f"no {kind}s")
        return
    grid = figure.subplots(-(-len(each) // columns), min(columns, len(each)), squeeze=False).ravel()
    for axes, (layer, histogram) in zip(grid, each.items()):
        _small_histogram(axes, layer, histogram)
    for axes in grid[len(each) :]:
        axes.set_axis_off()


def _small_histogram(axes: Axes, layer: str, histogram: Histogram) -> None:
    color = style.BAD if histogram.bad else style.TEXT
    axes.set_title(_title(layer), fontsize=7, loc="left", color=color, pad=3, parse_math=False)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    if not histogram.note:
        style.show_message(axes, bad_text(histogram.bad) or "no values")
        return
    bars(axes, histogram.counts / histogram.counts.max(), style.BLUE, apart=histogram.whole)
    style.draw_axis(axes, "x", histogram.axis, "", limit=5, whole=histogram.whole)
    axes.tick_params(labelsize=style.TINY)
    if histogram.bad:
        options: Any = {"ha": "right", "va": "top", "fontsize": style.TINY, "color": style.BAD}
        axes.text(0.99, 0.97, bad_text(histogram.bad), transform=axes.transAxes, **options)


def _title(layer: str) -> str:
    """The name in two lines if it is long: shortened, the parameters of equal blocks would have the same title."""
    text = style.safe_text(layer, 2 * LONGEST_LINE)
    if len(text) <= LONGEST_LINE:
        return text
    end = text.rfind(".", len(text) - LONGEST_LINE - 1, LONGEST_LINE) + 1 or LONGEST_LINE
    return f"{text[:end]}\n{text[end:]}"


def _quantile_rows(figure: Figure, name: str, each: Mapping[str, Histogram], high: float, kind: str) -> None:
    """Five quantiles for each layer, one row each, on one axis."""
    _grid_heading(figure, name, each, kind, "of each the median (black), the middle 50 % (dark) and the middle 90 % (light)")
    axes = figure.add_subplot()
    known = {row: histogram for row, histogram in enumerate(each.values()) if histogram.note}
    rows = np.array(list(known))
    table = np.array([histogram.quantiles for histogram in known.values()]).reshape(-1, len(QUANTILES))
    axis = spread_axis(table.ravel())
    places = axis.place(table)
    style.grid(axes, "x")
    for left, right, color in ((places[:, 0], places[:, 4], style.SKY), (places[:, 1], places[:, 3], style.BLUE)):
        _bars_as_area(axes, rows, left, right, color, height=0.8 if len(each) <= BARS_UP_TO else 1.0)
    axes.vlines(places[:, 2], rows - 0.5, rows + 0.5, colors=style.TEXT, linewidth=0.9)
    bad = [row for row, histogram in enumerate(each.values()) if histogram.bad]
    if bad:  # even an empty line takes room
        axes.plot([1.0] * len(bad), bad, linestyle="none", marker="x", markersize=4, color=style.BAD, clip_on=False)
    style.draw_axis(axes, "x", axis, "value" + axis.scale_note, limit=8)
    axes.set_ylim(len(each) - 0.5, -0.5)
    row_ticks(axes, list(each), high)


def _bars_as_area(axes: Axes, rows: Any, left: Floats, right: Floats, color: str, height: float) -> None:
    """Bars that touch each other as one area; rows that are missing leave a gap."""
    heights = np.repeat(rows, 2) + np.tile([-height / 2, height / 2], len(rows))
    breaks = np.flatnonzero(np.diff(rows) > height) * 2 + 2
    pieces = [np.split(each, breaks) for each in (heights, np.repeat(left, 2), np.repeat(right, 2))]
    for y, low, high in zip(*pieces):
        axes.fill_betweenx(y, low, high, color=color, linewidth=0)

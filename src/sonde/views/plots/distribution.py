"""How often which value occurs. What is not finite stands beside the others, in bars of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sonde.rules.words import number
from sonde.views.axis import LARGEST, Axis, linear_axis, spread_axis
from sonde.views.numbers import counted
from sonde.views.plots import ink
from sonde.views.plots.plot import Plot
from sonde.views.plots.values import Floats, bad_text, checked_bins, non_finite, plain_array, range_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
LOWEST = 1e-9  # where bars stand: zero, as far as a logarithmic axis can show it
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
            "num_values": self.num,
            "non_finite": self.bad,
            "scale": self.axis.scale,
            "edges": self.edges.tolist(),
            "counts": self.counts.astype(int).tolist(),
            "quantiles": dict(zip(map(str, QUANTILES), self.quantiles)),
        }


def binned(values: Any, bins: int, axis: Axis | None = None, what: str = "values") -> Histogram:
    """The histogram of any values; on `axis` where several are to be compared."""
    bins = checked_bins(bins)
    given = plain_array(values, what).reshape(-1)
    numbers = given.astype(np.float64, copy=False)
    finite, whole = numbers[np.isfinite(numbers)], False
    bad = non_finite(numbers)
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
    shares = np.clip(axis.place(finite), 0.0, 1.0)
    counts, edges = np.histogram(shares, bins=bins, range=(0.0, 1.0))
    quantiles = tuple(np.quantile(finite, QUANTILES, method="lower").tolist())
    return Histogram(axis, axis.values(edges), counts.astype(np.float64), bad, numbers.size, range_text(finite), quantiles, whole)


def is_steep(counts: Floats) -> bool:
    """Whether bars of these heights are to be drawn on a logarithmic axis."""
    filled = counts[counts > 0]
    return bool(filled.size) and bool(filled.max() > PEAK * np.median(filled))


def distribution(values: Any, *, name: str = "values", bins: int = 64, unit: str = "") -> Plot:
    """A histogram of any values, with the median and the middle 90 % marked."""
    histogram = binned(values, bins, what=name)
    data = {"kind": "distribution", "unit": unit, **histogram.data()}
    return Plot(name, lambda figure: _draw(figure, name, histogram, unit), data=data)


def _draw(figure: Figure, name: str, histogram: Histogram, unit: str) -> None:
    notes = counted(histogram.num, "value")
    if histogram.note:
        notes += f", {histogram.note}; median {number(histogram.quantiles[2])} (dashed), the middle 90 % darker"
    ink.heading(figure, name, notes, bad_text(histogram.bad))
    columns = len(histogram.bad)
    if not histogram.note and not columns:
        ink.say(figure.add_subplot(), "no values")
        return
    if columns:
        axes, beside = figure.subplots(1, 2, width_ratios=[16, 1.3 * columns])
    else:
        axes, beside = figure.add_subplot(), None
    heights = np.concatenate([histogram.counts, np.array(list(histogram.bad.values()), np.float64)])
    steep = is_steep(heights)
    if histogram.note:
        _bars(axes, histogram, unit, steep)
    else:
        ink.say(axes, "no finite value")
    for each in (axes, beside):
        if each is not None and (each is beside or histogram.note):
            _count_axis(each, heights.max(), steep)
    if beside is not None:
        _bad_bars(beside, histogram.bad, labelled=not histogram.note)


def _bars(axes: Axes, histogram: Histogram, unit: str, steep: bool) -> None:
    edges = np.linspace(0.0, 1.0, len(histogram.counts) + 1)
    low, high = histogram.axis.place(np.array([histogram.quantiles[0], histogram.quantiles[-1]])).tolist()
    middle = (edges[1:] > low - 1e-12) & (edges[:-1] < high + 1e-12)
    for chosen, colour in ((middle, ink.BLUE), (~middle, ink.SKY)):
        bars(axes, np.where(chosen, histogram.counts, 0.0), colour, apart=histogram.whole)
    median = float(histogram.axis.place(np.array([histogram.quantiles[2]]))[0])
    axes.axvline(median, color=ink.INK, linewidth=0.9, linestyle=(0, (4, 2)))
    label = "value" + (f" [{unit}]" if unit else "") + ("" if histogram.axis.scale == "linear" else f" ({histogram.axis.scale})")
    ink.draw_axis(axes, "x", histogram.axis, label, limit=8, whole=histogram.whole)
    axes.set_ylabel("number of values" + (" (log)" if steep else ""))


def bars(axes: Axes, heights: Floats, colour: str, *, apart: bool = False) -> None:
    """Bars side by side from 0 to 1; `apart` leaves gaps."""
    edges = np.linspace(0.0, 1.0, len(heights) + 1)
    if apart:
        axes.bar((edges[1:] + edges[:-1]) / 2, heights, 0.9 / len(heights), color=colour, linewidth=0)
    else:
        # One outline for all: between rectangles a viewer of vector graphics shows hairlines.
        axes.stairs(heights, edges, baseline=LOWEST, fill=True, color=colour, linewidth=0)


def _bad_bars(axes: Axes, bad: dict[str, int], *, labelled: bool) -> None:
    axes.bar(range(len(bad)), list(bad.values()), 0.7, facecolor=ink.PAPER, edgecolor=ink.BAD, hatch="////", linewidth=0.8)
    axes.set_xticks(range(len(bad)), labels=[_short(name) for name in bad], color=ink.BAD)
    axes.set_xlim(-0.6, len(bad) - 0.4)
    for place, count in enumerate(bad.values()):
        text = f"{count:,}"
        axes.annotate(text, (place, count), (0, 2), textcoords="offset points", ha="center", fontsize=ink.TINY, color=ink.BAD)
    if labelled:
        axes.set_ylabel("number of values")
    else:
        axes.tick_params(axis="y", labelleft=False)


def _short(name: str) -> str:
    return name.replace("Infinity", "Inf").replace("-", "−")


def _count_axis(axes: Axes, highest: float, steep: bool) -> None:
    ink.grid(axes, "y")
    if steep:
        axes.set_yscale("log")
        axes.set_ylim(0.7, highest * 1.6)
    else:
        axes.set_ylim(0, highest * 1.08)
        axes.yaxis.set_major_locator(_whole())


def _whole() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=5, integer=True)

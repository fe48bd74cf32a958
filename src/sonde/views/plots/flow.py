"""Gradient norms over the steps: a line for each layer, or bands over all of them where there are too many for lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.views.axis import curve_axis, linear_axis
from sonde.views.numbers import counted
from sonde.views.plots import ink
from sonde.views.plots.plot import Plot
from sonde.views.plots.values import Floats, bad_text, non_finite, one_row, steps_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = len(ink.LINES)
DOTS_UP_TO = 40  # steps: with more, dots would be a thicker line
BANDS = ((0, 100, 0.18, "lowest to highest"), (10, 90, 0.35, "middle 80 %"))


def gradient_flow(steps: Any, gradients: Mapping[str, Sequence[float]] | Sequence[float], *, name: str = "gradient flow") -> Plot:
    """Norms over steps, of one layer or of many; the axis is logarithmic where they span decades."""
    series = dict(gradients) if isinstance(gradients, Mapping) else {"": gradients}
    rows = {str(layer): one_row(values, f"gradients of {layer!r}" if layer else "gradients") for layer, values in series.items()}
    first = next(iter(rows.values()), np.zeros(0))
    places = steps_for(steps, first.size, "gradients" + (f" of {next(iter(rows))!r}" if next(iter(rows), "") else ""))
    for layer, values in rows.items():
        steps_for(steps, values.size, f"gradients of {layer!r}" if layer else "gradients")
    order = np.argsort(places, kind="stable")
    places = places[order]
    matrix = np.stack([values[order] for values in rows.values()]) if rows else np.zeros((0, places.size))
    names = list(rows)
    data = {
        "kind": "gradient_flow",
        "steps": [int(step) if step.is_integer() else step for step in places.tolist()],
        "norms": dict(zip(names, matrix)),
        "non_finite": non_finite(matrix),
    }
    return Plot(name, lambda figure: _draw(figure, name, places, names, matrix), data=data)


def _draw(figure: Figure, name: str, steps: Floats, names: list[str], matrix: Floats) -> None:
    notes = counted(steps.size, "step") + (f", {counted(len(names), 'layer')}" if names and names != [""] else "")
    bad = non_finite(matrix)
    first = ""
    if bad:
        row, column = np.argwhere(~np.isfinite(matrix.T))[0][::-1]
        first = f"; the first at step {steps[column]:g}" + (f" in {names[row]}" if names[row] else "")
    ink.heading(figure, name, notes, bad_text(bad) + first)
    axes = figure.add_subplot()
    if not matrix.size:
        ink.say(axes, "no gradients")
        return
    across, up = linear_axis(steps.min(), steps.max()), curve_axis(matrix)
    ink.grid(axes)
    ink.draw_axis(axes, "y", up, "gradient norm" + ("" if up.scale == "linear" else f" ({up.scale})"))
    ink.draw_axis(axes, "x", across, "step", limit=8)
    x, heights = across.place(steps), up.place(matrix)
    if len(names) <= MOST_LINES:
        for row, colour in zip(range(len(names)), ink.LINES):
            line(axes, x, heights[row], colour, names[row])
    else:
        _bands(axes, x, heights, names)
    marks(axes, x, matrix)
    if names != [""]:
        handles, labels = axes.get_legend_handles_labels()
        legend = axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=7, borderaxespad=0)
        for text in legend.get_texts():
            text.set_parse_math(False)


def line(axes: Axes, x: Floats, heights: Floats, colour: str, name: str) -> None:
    """One curve; what stands alone, between two bad numbers or among few, is a dot."""
    alone = np.isfinite(heights) & ~np.isfinite(np.r_[np.nan, heights[:-1]]) & ~np.isfinite(np.r_[heights[1:], np.nan])
    dots = np.isfinite(heights) if x.size <= DOTS_UP_TO else alone  # a value between two bad ones has no line to be seen by
    axes.plot(x, heights, color=colour, linewidth=1.2, label=ink.safe(name, 34), solid_joinstyle="round")
    axes.plot(x[dots], heights[dots], linestyle="none", marker="o", markersize=2.4, color=colour)


def _bands(axes: Axes, x: Floats, heights: Floats, names: list[str]) -> None:
    """All layers as bands; those that end highest and lowest by name."""
    known = np.isfinite(heights).any(axis=0)
    columns = np.where(known, heights, 0.0)
    for low, high, opacity, label in BANDS:
        bottom, top = (np.where(known, np.nanpercentile(columns, share, axis=0), np.nan) for share in (low, high))
        axes.fill_between(x, bottom, top, color=ink.BLUE, alpha=opacity, linewidth=0, label=label)
    axes.plot(x, np.where(known, np.nanmedian(columns, axis=0), np.nan), color=ink.BLUE, linewidth=1.4, label="median layer")
    last = np.array([_last(row) for row in heights])
    ranked = [index for index in np.argsort(last, kind="stable").tolist() if math.isfinite(last[index])]
    shown = dict.fromkeys([*ranked[:-3:-1], *ranked[:2]])
    for index, colour in zip(shown, (ink.VERMILION, ink.ORANGE, ink.GREEN, ink.PURPLE)):
        line(axes, x, heights[index], colour, names[index])


def _last(row: Floats) -> float:
    finite = row[np.isfinite(row)]
    return float(finite[-1]) if finite.size else math.nan


def marks(axes: Axes, x: Floats, matrix: Floats) -> None:
    """A red band over each step with a bad number; above and below the lines what it is: a cross, an arrow up, an arrow down."""
    bad_steps = ~np.isfinite(matrix).all(axis=0)
    for start, end in _stretches(bad_steps):
        half = 0.5 / max(x.size - 1, 40)
        axes.axvspan(x[start] - half, x[end] + half, facecolor=ink.BAD, alpha=0.13, linewidth=0)
    kinds = (("x", np.isnan(matrix), 1.09, "NaN"), ("^", matrix == np.inf, 1.05, "Infinity"), ("v", matrix == -np.inf, -0.05, "-Infinity"))
    if bad_steps.any():
        axes.set_ylim(-0.08 if np.isneginf(matrix).any() else -0.01, 1.13)
    for marker, found, height, label in kinds:
        columns = found.any(axis=0)
        if columns.any():
            y = np.full(int(columns.sum()), height)
            axes.plot(x[columns], y, linestyle="none", marker=marker, markersize=4, color=ink.BAD, label=label)


def _stretches(flags: Any) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.r_[False, flags, False].astype(int)))
    return [(int(start), int(end) - 1) for start, end in zip(edges[::2], edges[1::2])]

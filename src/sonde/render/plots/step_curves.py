"""Curves over steps: gradient norms per layer, and the percentiles of a distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.formatting import counted
from sonde.render.axis_ticks import curve_axis, linear_axis, spread_axis
from sonde.render.plots import style
from sonde.render.plots.arrays_to_plot import Floats, bad_text, non_finite, one_row, plain_steps, steps_for, stretches
from sonde.render.plots.plot import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = len(style.LINE_COLORS)
DOTS_UP_TO = 40  # steps: with more, dots would be a thicker line
LAYER_BANDS = ((0, 100, 0.18, "lowest to highest"), (10, 90, 0.35, "middle 80 %"))
PERCENTILE_BANDS = ((0, 100, 0.12), (5, 95, 0.25), (25, 75, 0.45))


def gradient_flow(steps: Any, gradients: Mapping[str, Sequence[float]] | Sequence[float], *, name: str = "gradient flow") -> Plot:
    """Norms over steps, of one layer or of many; the axis is logarithmic where they span decades."""
    series = dict(gradients) if isinstance(gradients, Mapping) else {"": gradients}
    titles = {layer: f"gradients of {layer!r}" if layer else "gradients" for layer in series}
    rows = {str(layer): one_row(values, titles[layer]) for layer, values in series.items()}
    places = np.zeros(0) if rows else steps_for(steps, 0, "gradients")
    for values, title in zip(rows.values(), titles.values()):
        places = steps_for(steps, values.size, title)
    order = np.argsort(places, kind="stable")
    places = places[order]
    matrix = np.stack([values[order] for values in rows.values()]) if rows else np.zeros((0, places.size))
    names = list(rows)
    data = {"kind": "gradient_flow", "steps": plain_steps(places), "norms": dict(zip(names, matrix)), "non_finite": non_finite(matrix)}
    return Plot(name, lambda figure: _draw_flow(figure, name, places, names, matrix), data=data)


def _draw_flow(figure: Figure, name: str, steps: Floats, names: list[str], matrix: Floats) -> None:
    notes = counted(steps.size, "step") + (f", {counted(len(names), 'layer')}" if names and names != [""] else "")
    bad = non_finite(matrix)
    first = ""
    if bad:
        row, column = np.argwhere(~np.isfinite(matrix.T))[0][::-1]
        first = f"; the first at step {steps[column]:g}" + (f" in {names[row]}" if names[row] else "")
    style.heading(figure, name, notes, bad_text(bad) + first)
    axes = figure.add_subplot()
    if not matrix.size:
        style.show_message(axes, "no gradients")
        return
    across, up = linear_axis(steps.min(), steps.max()), curve_axis(matrix)
    style.grid(axes)
    style.draw_axis(axes, "y", up, "gradient norm" + up.scale_note)
    style.draw_axis(axes, "x", across, "step", limit=8)
    x, heights = across.place(steps), up.place(matrix)
    if len(names) <= MOST_LINES:
        for row, color in zip(range(len(names)), style.LINE_COLORS):
            draw_line(axes, x, heights[row], color, names[row])
    else:
        _bands(axes, x, heights, names)
    mark_nonfinite(axes, x, matrix)
    if names != [""]:
        style.legend_beside(axes)


def percentiles(steps: Any, levels: Mapping[int, Any], *, name: str, num_bad: Any = (), x_label: str = "step") -> Plot:
    """`levels` has a row of values per percentile: 0, 5, 25, 50, 75, 95, 100. `num_bad` counts numbers that are not finite."""
    rows = {level: one_row(values, f"percentile {level}") for level, values in sorted(levels.items())}
    num = next((values.size for values in rows.values()), 0)
    places = steps_for(steps, num, "percentiles")
    bad = one_row(num_bad, "num_bad") if len(num_bad) else np.zeros(num)
    data = {"kind": "percentiles", "steps": places, "levels": {str(level): values for level, values in rows.items()}, "num_bad": bad}

    def draw(figure: Figure) -> None:
        warning = f"{counted(int(bad.sum()), 'number')} not finite, in {counted(int((bad > 0).sum()), x_label)}" if bad.any() else ""
        style.heading(figure, name, counted(num, x_label), warning)
        axes = figure.add_subplot()
        if not num or not any(np.isfinite(values).any() for values in rows.values()):
            style.show_message(axes, "no finite values")
            return
        across, up = linear_axis(places.min(), places.max()), spread_axis(np.concatenate(list(rows.values())))
        style.grid(axes)
        style.draw_axis(axes, "y", up, "value" + up.scale_note)
        style.draw_axis(axes, "x", across, x_label, limit=8, whole=True)
        x = across.place(places)
        for low, high, opacity in PERCENTILE_BANDS:
            if low in rows and high in rows:
                label = "lowest to highest" if low == 0 else f"{low} to {high} %"
                axes.fill_between(x, up.place(rows[low]), up.place(rows[high]), color=style.BLUE, alpha=opacity, linewidth=0, label=label)
        if 50 in rows:
            axes.plot(x, up.place(rows[50]), color=style.BLUE, linewidth=1.4, label="median")
        half = 0.5 / max(num - 1, 40)
        for place in x[bad > 0].tolist():
            axes.axvspan(place - half, place + half, facecolor=style.BAD, alpha=0.25, linewidth=0)
        if bad.any():
            axes.plot(x[bad > 0], np.full(int((bad > 0).sum()), 1.05), "x", markersize=4, color=style.BAD, label="not finite")
            axes.set_ylim(-0.01, 1.09)
        style.legend_beside(axes)

    return Plot(name, draw, data=data)


def draw_line(axes: Axes, x: Floats, heights: Floats, color: str, name: str) -> None:
    """One curve; values between two non-finite ones, and all values where there are few, are dots."""
    alone = np.isfinite(heights) & ~np.isfinite(np.r_[np.nan, heights[:-1]]) & ~np.isfinite(np.r_[heights[1:], np.nan])
    dots = np.isfinite(heights) if x.size <= DOTS_UP_TO else alone
    axes.plot(x, heights, color=color, linewidth=1.2, label=style.safe_text(name, 34), solid_joinstyle="round")
    axes.plot(x[dots], heights[dots], linestyle="none", marker="o", markersize=2.4, color=color)


def _bands(axes: Axes, x: Floats, heights: Floats, names: list[str]) -> None:
    """All layers as bands; those that end highest and lowest by name."""
    known = np.isfinite(heights).any(axis=0)
    columns = np.where(known, heights, 0.0)
    for low, high, opacity, label in LAYER_BANDS:
        bottom, top = (np.where(known, np.nanpercentile(columns, share, axis=0), np.nan) for share in (low, high))
        axes.fill_between(x, bottom, top, color=style.BLUE, alpha=opacity, linewidth=0, label=label)
    axes.plot(x, np.where(known, np.nanmedian(columns, axis=0), np.nan), color=style.BLUE, linewidth=1.4, label="median layer")
    last = {index: row[np.isfinite(row)][-1] for index, row in enumerate(heights) if np.isfinite(row).any()}
    ranked = sorted(last, key=lambda index: last[index])
    shown = dict.fromkeys([*ranked[:-3:-1], *ranked[:2]])
    for index, color in zip(shown, (style.VERMILION, style.ORANGE, style.GREEN, style.PURPLE)):
        draw_line(axes, x, heights[index], color, names[index])


def mark_nonfinite(axes: Axes, x: Floats, matrix: Floats) -> None:
    """A red band over each step with a non-finite value, and its kind above or below the curves: a cross, an arrow up, an arrow down."""
    bad_steps = ~np.isfinite(matrix).all(axis=0)
    half = 0.5 / max(x.size - 1, 40)
    for start, end in stretches(bad_steps):
        axes.axvspan(x[start] - half, x[end] + half, facecolor=style.BAD, alpha=0.13, linewidth=0)
    kinds = (("x", np.isnan(matrix), 1.09, "NaN"), ("^", matrix == np.inf, 1.05, "Infinity"), ("v", matrix == -np.inf, -0.05, "-Infinity"))
    if bad_steps.any():
        axes.set_ylim(-0.08 if np.isneginf(matrix).any() else -0.01, 1.13)
    for marker, found, height, label in kinds:
        marked = x[found.any(axis=0)]
        if marked.size:
            axes.plot(marked, np.full(marked.size, height), marker, markersize=4, color=style.BAD, label=label)

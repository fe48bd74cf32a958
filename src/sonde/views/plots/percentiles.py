"""How a distribution changes from step to step: bands between percentiles, the median, and in red the steps with bad numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.views.axis import linear_axis, spread_axis
from sonde.views.numbers import counted
from sonde.views.plots import ink
from sonde.views.plots.plot import Plot
from sonde.views.plots.values import one_row, steps_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BANDS = ((0, 100, 0.12), (5, 95, 0.25), (25, 75, 0.45))


def percentiles(steps: Any, levels: Mapping[int, Any], *, name: str, num_bad: Any = (), x_label: str = "step") -> Plot:
    """`levels` has a row of values per percentile: 0, 5, 25, 50, 75, 95, 100. `num_bad` counts numbers that are not finite."""
    rows = {level: one_row(values, f"percentile {level}") for level, values in sorted(levels.items())}
    num = next((values.size for values in rows.values()), 0)
    places = steps_for(steps, num, "percentiles")
    bad = one_row(num_bad, "num_bad") if len(num_bad) else np.zeros(num)
    data = {"kind": "percentiles", "steps": places, "levels": {str(level): values for level, values in rows.items()}, "num_bad": bad}

    def draw(figure: Figure) -> None:
        warning = f"{counted(int(bad.sum()), 'number')} not finite, in {counted(int((bad > 0).sum()), x_label)}" if bad.any() else ""
        ink.heading(figure, name, counted(num, x_label), warning)
        axes = figure.add_subplot()
        if not num or not any(np.isfinite(values).any() for values in rows.values()):
            ink.say(axes, "no finite values")
            return
        across, up = linear_axis(places.min(), places.max()), spread_axis(np.concatenate(list(rows.values())))
        ink.grid(axes)
        ink.draw_axis(axes, "y", up, "value" + ("" if up.scale == "linear" else f" ({up.scale})"))
        ink.draw_axis(axes, "x", across, x_label, limit=8, whole=True)
        x = across.place(places)
        for low, high, opacity in BANDS:
            if low in rows and high in rows:
                label = "lowest to highest" if low == 0 else f"{low} to {high} %"
                axes.fill_between(x, up.place(rows[low]), up.place(rows[high]), color=ink.BLUE, alpha=opacity, linewidth=0, label=label)
        if 50 in rows:
            axes.plot(x, up.place(rows[50]), color=ink.BLUE, linewidth=1.4, label="median")
        half = 0.5 / max(num - 1, 40)
        for place in x[bad > 0].tolist():
            axes.axvspan(place - half, place + half, facecolor=ink.BAD, alpha=0.25, linewidth=0)
        if bad.any():
            axes.plot(x[bad > 0], np.full(int((bad > 0).sum()), 1.05), "x", markersize=4, color=ink.BAD, label="not finite")
            axes.set_ylim(-0.01, 1.09)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=7, borderaxespad=0)

    return Plot(name, draw, data=data)

"""Several small plots of one training in one figure, each with its own axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.render.axis_ticks import Axis, curve_axis, linear_axis
from sonde.render.plots import style
from sonde.render.plots.arrays_to_plot import Floats, bad_text, non_finite
from sonde.render.plots.plot import Plot
from sonde.render.plots.step_curves import draw_line, mark_nonfinite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 2
MOST_BESIDE = 4  # labels that find a place among the curves
MOST_LINES = len(style.LINE_COLORS)


@dataclass(frozen=True, slots=True)
class Panel:
    """Some series over one axis; each has its own steps. `flagged` steps get a mark at the bottom, and `flag` is its label."""

    title: str
    label: str  # of the vertical axis, with the unit
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    flagged: Sequence[float] = ()
    flag: str = ""
    empty: str = "nothing recorded"
    x_label: str = "step"
    includes: float | None = None  # a value that the vertical axis covers, for instance 0

    @property
    def data(self) -> dict[str, Any]:
        series = {name: {"steps": list(steps), "values": list(values)} for name, (steps, values) in self.series.items()}
        return {"label": self.label, "series": series, "flagged": list(self.flagged)}


@dataclass(frozen=True, slots=True)
class EventPanel:
    """Events over one axis: a row for each kind, a mark at each step. The axis covers `span`."""

    title: str
    events: Mapping[str, Sequence[float]] = field(default_factory=dict)  # kind -> steps
    span: tuple[float, float] = (0.0, 0.0)
    empty: str = "no events"
    x_label: str = "step"

    @property
    def data(self) -> dict[str, Any]:
        return {"events": {kind: list(steps) for kind, steps in self.events.items()}}


def panels(name: str, each: Sequence[Panel | EventPanel], *, notes: str = "") -> Plot:
    """Two beside each other, in as many rows as it takes."""
    rows = -(-max(len(each), 1) // COLUMNS)
    data = {"kind": "panels", "panels": {panel.title: panel.data for panel in each}}
    return Plot(name, lambda figure: _draw(figure, name, each, rows, notes), data=data, size=(8.4, 0.9 + 2.4 * rows))


def _draw(figure: Figure, name: str, each: Sequence[Panel | EventPanel], rows: int, notes: str) -> None:
    bad = {panel.title: bad_text(non_finite(_values(panel))) for panel in each if isinstance(panel, Panel)}
    style.heading(figure, name, notes, "; ".join(f"{title}: {text}" for title, text in bad.items() if text))
    grid = figure.subplots(rows, min(COLUMNS, max(len(each), 1)), squeeze=False).ravel()
    for axes, panel in zip(grid, each):
        if isinstance(panel, Panel):
            draw_panel(axes, panel)
        else:
            _draw_events(axes, panel)
    for axes in grid[len(each) :]:
        axes.set_axis_off()


def draw_panel(axes: Axes, panel: Panel, *, also: Sequence[tuple[float, float]] = ()) -> tuple[Axis, Axis] | None:
    """Draws one panel and returns its axes, for what is drawn on top. They have room for the points in `also`."""
    _set_title(axes, panel.title)
    every = _values(panel)
    if not every.size:
        style.show_message(axes, panel.empty)
        return None
    places = [step for steps, _ in panel.series.values() for step in steps] + [x for x, _ in also]
    across = linear_axis(min(places), max(places))
    included = [y for _, y in also] + ([] if panel.includes is None else [panel.includes])
    up = curve_axis(np.concatenate([every, np.array(included, np.float64)]))
    style.grid(axes)
    style.draw_axis(axes, "x", across, panel.x_label, limit=6, whole=True)
    style.draw_axis(axes, "y", up, panel.label + up.scale_note, limit=5)
    for (label, (steps, values)), color in zip(panel.series.items(), style.LINE_COLORS):
        x = across.place(steps)
        draw_line(axes, x, up.place(values), color, label)
        mark_nonfinite(axes, x, np.asarray([values], np.float64))
    if len(panel.flagged):
        sign: Any = {"linestyle": "none", "marker": "|", "markersize": 7, "color": style.VERMILION, "clip_on": False}
        axes.plot(across.place(panel.flagged), np.zeros(len(panel.flagged)), label=style.safe_text(panel.flag), **sign)
    handles, labels = axes.get_legend_handles_labels()
    shown = dict(zip(labels, handles))  # one sign for a kind of bad number, however many series have it
    if len(labels) > 1:
        options: Any = {"loc": "best", "fontsize": style.TINY, "facecolor": style.BACKGROUND, "edgecolor": "none", "framealpha": 0.85}
        if len(shown) > MOST_BESIDE or not np.isfinite(every).all():  # room of their own above the curves and above marks of NaN
            axes.set_ylim(top=max(axes.get_ylim()[1], 1.3))
            options |= {"ncols": 3, "loc": "upper left", "columnspacing": 1.0, "handlelength": 1.2}
        style.without_math(axes.legend(list(shown.values()), list(shown), **options).get_texts())
    return across, up


def _draw_events(axes: Axes, panel: EventPanel) -> None:
    _set_title(axes, panel.title)
    if not panel.events:
        style.show_message(axes, panel.empty)
        return
    across = linear_axis(*panel.span)
    style.grid(axes, "x")
    style.draw_axis(axes, "x", across, panel.x_label, limit=6)
    heights = 1 - (np.arange(len(panel.events)) + 0.5) / len(panel.events)
    labels = [f"{style.safe_text(kind, 24)} ({len(steps):,})" for kind, steps in panel.events.items()]
    axes.set_yticks(heights, labels=labels, fontsize=style.SMALL - 1)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(0, 1)
    for height, steps, color in zip(heights, panel.events.values(), style.LINE_COLORS):
        x = across.place(steps)
        axes.axhline(height, color=style.GRID, linewidth=0.6, zorder=0)
        axes.plot(x, np.full(len(x), height), linestyle="none", marker="|", markersize=11, markeredgewidth=1.8, color=color, clip_on=False)


def _set_title(axes: Axes, title: str) -> None:
    axes.set_title(style.safe_text(title, 60), fontsize=style.SMALL, loc="left", color=style.TEXT, fontweight="bold", parse_math=False)


def _values(panel: Panel) -> Floats:
    rows = [np.asarray(values, np.float64) for _, values in panel.series.values()]
    return np.concatenate(rows) if rows else np.zeros(0)

"""Memory over time: what is alive, by category, one above the other; the peak and the user's snapshots are marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sonde.formatting import size
from sonde.render.axis_ticks import linear_axis
from sonde.render.plots import style
from sonde.render.plots.plot import Plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sonde.memory_profiler.memory_report import DeviceMemory, MemoryReport, Snapshot

COLORS = (style.BLUE, style.SKY, style.PURPLE, style.VERMILION, style.GRID)
MIB = 2**20
MOST_MARKS = 12  # snapshots whose names have room


def memory_plot(report: MemoryReport, device: str | None = None) -> Plot:
    """The timeline of a device, of the one that matters where none is named."""
    one = report.on(device)
    times = [point.time_s for point in one.timeline]
    data = {
        "kind": "memory", "device": one.device, "time_s": times,
        "bytes": {category: [point.values[row] for point in one.timeline] for row, category in enumerate(one.now.by_category())},
        "snapshots": {snapshot.label: snapshot.time_s for snapshot in report.snapshots}, "peak_s": one.peak.time_s,
    }  # fmt: skip
    name = f"memory of {one.device}"
    return Plot(name, lambda figure: _draw(figure, name, one, report.snapshots), data=data, size=(7.2, 3.6))


def _draw(figure: Figure, name: str, one: DeviceMemory, snapshots: tuple[Snapshot, ...]) -> None:
    peak = one.peak
    where = " ".join(part for part in (peak.phase, peak.module, peak.source) if part)
    style.heading(figure, name, f"peak of {size(peak.usage.total)} after {peak.time_s:.2f} s" + (f", {where}" if where else ""))
    axes = figure.add_subplot()
    if len(one.timeline) < 2:
        style.show_message(axes, "no timeline: nothing was measured between start() and stop()")
        return
    times = np.array([point.time_s for point in one.timeline])
    layers = np.array([point.values for point in one.timeline], dtype=float).T / MIB
    across, up = linear_axis(times[0], times[-1]), linear_axis(0.0, float(layers.sum(axis=0).max()) * 1.05)
    style.grid(axes)
    style.draw_axis(axes, "x", across, "seconds", limit=8)
    style.draw_axis(axes, "y", up, "MiB")
    x, below = across.place(times), np.zeros(len(times))
    for values, category, color in zip(layers, one.now.by_category(), COLORS):
        top = below + values
        axes.fill_between(x, up.place(below), up.place(top), step="post", facecolor=color, linewidth=0, label=category)
        below = top
    at = [float(across.place(peak.time_s))], [float(up.place(peak.usage.total / MIB))]
    axes.plot(*at, marker="v", markersize=5, color=style.TEXT, linestyle="none")
    for snapshot in snapshots[:MOST_MARKS]:
        place = float(across.place(snapshot.time_s))
        if 0 <= place <= 1:
            axes.axvline(place, color=style.GRAY, linewidth=0.6, linestyle=":")
            label = style.safe_text(snapshot.label, 18)
            axes.text(place, 1.0, label, fontsize=style.TINY, color=style.GRAY, rotation=90, va="top", ha="right", parse_math=False)
    style.legend_beside(axes, reverse=True)

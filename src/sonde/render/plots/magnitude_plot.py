"""Where the numbers of many tensors lie among the powers of two, and where the formats end that could hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.formatting import counted
from sonde.render.plots import style
from sonde.render.plots.heatmap_plot import row_ticks
from sonde.render.plots.plot import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOM = 4  # powers of two beside the outermost numbers
MOST_NOTES = 60
TAIL = 0.01  # share of the numbers below which a bar is only a line


def magnitudes(
    rows: Mapping[str, Mapping[int, int]], ranges: Mapping[str, tuple[float, float, float]], *, name: str, notes: Mapping[str, str],
) -> Plot:  # fmt: skip
    """One row per tensor: how many of its numbers have which floor(log2 |x|). `notes` has, by tensor, what has no magnitude: `3 NaN`.

    `ranges` has, per format, the logarithms of its smallest number, its smallest normal number and its largest one.
    """
    names = list(rows)
    used = [exponent for counts in rows.values() for exponent in counts]
    low, high = (float(min(used) - ROOM), float(max(used) + 1 + ROOM)) if used else (-1.0, 1.0)
    shown = {label: span for label, span in ranges.items() if span[0] > low - 40 or span[2] < high + 40}
    for smallest, _, largest in shown.values():  # the edges that matter are those near the numbers
        low, high = (smallest - 1 if low - 24 < smallest < low else low), (largest + 1 if high < largest < high + 24 else high)
    data = {"kind": "magnitudes", "exponents": rows, "notes": dict(notes), "ranges": {label: list(span) for label, span in ranges.items()}}
    height = min(max(1.9 + 0.2 * len(shown) + 0.16 * len(names), 2.6), 9.0)

    def draw(figure: Figure) -> None:
        num_bad = sum("NaN" in note or "Inf" in note for note in notes.values())
        warning = f"NaN or Inf in {counted(num_bad, 'tensor')}" if num_bad else ""
        explained = f"{counted(len(names), 'tensor')}; the darker, the more numbers; the thin part has the smallest 1 %"
        style.heading(figure, name, explained, warning)
        if not names:
            style.show_message(figure.add_subplot(), "nothing was checked")
            return
        parts = figure.subplots(2, 1, sharex=True, height_ratios=[max(len(shown), 1) * 0.2, max(height - 1.5, 1.0)])
        _draw_ranges(parts[0], shown, low, high)
        _draw_rows(parts[1], names, rows, shown)
        row_ticks(parts[1], names, height)
        _draw_notes(parts[1], names, rows, notes)
        parts[1].set_xlim(low, high)
        parts[1].set_xlabel("magnitude |x| as a power of two")
        parts[1].xaxis.set_major_formatter(lambda value, _: rf"$2^{{{value:.0f}}}$")

    return Plot(name, draw, data=data, size=(6.8, height))


def _draw_ranges(axes: Axes, shown: Mapping[str, tuple[float, float, float]], low: float, high: float) -> None:
    for row, (smallest, normal, largest) in enumerate(shown.values()):
        color = style.LINE_COLORS[row % len(style.LINE_COLORS)]
        axes.barh(row, largest - normal, left=normal, height=0.6, color=color, alpha=0.55)
        axes.barh(row, normal - smallest, left=smallest, height=0.6, color="none", edgecolor=color, hatch="////", linewidth=0.0)
    axes.set_yticks(range(len(shown)), labels=list(shown), fontsize=style.TINY + 1)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(low, high)
    axes.tick_params(labelbottom=False, bottom=False, left=False)
    axes.spines[:].set_visible(False)
    axes.set_title("what a format holds (hatched: with fewer digits)", fontsize=7, color=style.GRAY, loc="left", pad=2)


def _draw_rows(axes: Axes, names: Sequence[str], rows: Mapping[str, Mapping[int, int]], shown: Mapping[str, tuple[float, ...]]) -> None:
    from matplotlib.colors import to_rgb

    blue = np.array(to_rgb(style.BLUE))
    for row, label in enumerate(names):
        exponents = sorted(rows[label])
        counts = np.array([rows[label][exponent] for exponent in exponents], dtype=float)
        if counts.size:
            thin = np.cumsum(counts) <= TAIL * counts.sum()
            colors = 1 - (1 - blue) * (0.15 + 0.85 * counts / counts.max())[:, None]
            axes.barh(np.full(counts.size, row), 1.0, left=exponents, height=np.where(thin, 0.2, 0.8), color=colors, linewidth=0)
    for row, (smallest, _, largest) in enumerate(shown.values()):
        for edge in (smallest, largest):
            axes.axvline(edge, color=style.LINE_COLORS[row % len(style.LINE_COLORS)], linewidth=0.7, linestyle=(0, (4, 3)), zorder=0)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _draw_notes(axes: Axes, names: Sequence[str], rows: Mapping[str, Mapping[int, int]], notes: Mapping[str, str]) -> None:
    """Beside the row, or in it where the tensor has no magnitude at all; NaN and Inf are red."""
    if len(notes) > MOST_NOTES:  # they would overlap: only a mark
        bad = [row for row, label in enumerate(names) if label in notes]
        axes.plot(np.full(len(bad), 1.012), bad, transform=axes.get_yaxis_transform(), linestyle="none", marker="<", markersize=3,
                  color=style.BAD, clip_on=False)  # fmt: skip
        return
    across = axes.get_yaxis_transform()
    for row, label in enumerate(names):
        if (note := notes.get(label)) is None:
            continue
        is_bad = "NaN" in note or "Inf" in note
        if not rows[label] and is_bad:
            axes.barh(row, 1.0, height=0.8, transform=across, color=style.BACKGROUND, edgecolor=style.BAD, hatch="////", linewidth=0)
        place: tuple[float, str] = (1.01, "left") if rows[label] else (0.5, "center")
        box = {"facecolor": style.BACKGROUND, "edgecolor": "none", "pad": 1.0}
        color = style.BAD if is_bad else style.GRAY
        options: Any = {"transform": across, "ha": place[1], "va": "center", "fontsize": style.TINY, "color": color, "bbox": box}
        axes.text(place[0], row, note, clip_on=False, **options)

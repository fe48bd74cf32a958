"""Heat maps: layers by steps, units by positions. A cell that is not finite is red and hatched, however many cells share its place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.errors import SondeError
from sonde.formatting import counted
from sonde.render.axis_ticks import Axis, curve_axis, linear_axis, row_labels, spread_axis
from sonde.render.plots import style
from sonde.render.plots.arrays_to_plot import (
    Floats,
    bad_text,
    coarse,
    floats,
    non_finite,
    place_text,
    plain_steps,
    range_text,
    steps_for,
    stretches,
    two_dimensional,
)
from sonde.render.plots.plot import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CELLS = 1500  # in one direction: more than a plot has pixels
MOST_MAPS, MAP_COLUMNS = 16, 4  # maps of one figure, beside each other
MOST_HATCHED = 2000  # rectangles; beyond that color alone must do


def layer_heatmap(names: Sequence[str], steps: Any, matrix: Any, *, name: str, label: str, unit: str = "") -> Plot:
    """One number per layer and step: rows are layers, columns are steps."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise SondeError(f"{name}: layers must be a list of names, one per row, not {names!r}.")
    layers = [str(each) for each in names]
    values = two_dimensional(matrix, name)
    if not values.size:
        values = values.reshape(len(layers), 0)
    if values.shape[0] != len(layers):
        raise SondeError(f"{name}: {len(layers)} names but {values.shape[0]} rows. Rows are layers: give one name per row.")
    places = steps_for(steps, values.shape[1], name)
    order = np.argsort(places, kind="stable")
    places, values = places[order], values[:, order].copy()
    data = {
        "kind": "layer_heatmap", "names": layers, "steps": plain_steps(places), "label": label, "unit": unit, "values": values,
        "non_finite": non_finite(values),
    }  # fmt: skip
    notes = f"{counted(len(layers), 'layer')}, {counted(places.size, 'step')}"
    caption = label + (f" [{unit}]" if unit else "")
    high = min(max(1.6 + 0.16 * len(layers), 2.4), 9.0)

    def draw(figure: Figure) -> None:
        axes = _draw(figure, name, values, notes, caption, curve_axis(values), row_names=layers)
        if axes is not None:
            row_ticks(axes, layers, high)
            _step_ticks(axes, places)
            _edge_marks(axes, values)
            axes.set_xlabel("step")

    return Plot(name, draw, data=data, size=(6.8, high))


def heatmap(matrix: Any, *, name: str, x_label: str, y_label: str, label: str = "") -> Plot:
    """One matrix of numbers; more than two dimensions are for `activation_heatmap`."""
    values = two_dimensional(matrix, name).copy()
    bad = non_finite(values)
    data = {"kind": "heatmap", "x_label": x_label, "y_label": y_label, "label": label, "values": values, "non_finite": bad}
    notes = f"{values.shape[0]:,} × {values.shape[1]:,}"

    def draw(figure: Figure) -> None:
        axes = _draw(figure, name, values, notes, label or "value", spread_axis(values))
        if axes is not None:
            axes.set_xlabel(style.safe_text(x_label), parse_math=False)
            axes.set_ylabel(style.safe_text(y_label), parse_math=False)
            for axis, num in zip((axes.yaxis, axes.xaxis), values.shape):
                if num > 1:
                    axis.set_major_locator(style.whole_number_ticks(6))
                else:
                    axis.set_ticks([0])

    return Plot(name, draw, data=data, size=(6.4, 4.2))


def units_by_positions(values: Any, units: int | None = None) -> Floats:
    """An activation of any shape as a matrix: units are rows, everything else is laid side by side as positions.

    `units` is the dimension of the units. Without it: the second for what looks like a convolution (four dimensions or more),
    the last for everything else.
    """
    array = floats(values)
    if array.ndim < 2:
        return array.reshape(-1, 1)
    axis = units if units is not None else (1 if array.ndim >= 4 else -1)
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise SondeError(f"units must be the number of a dimension, for instance units=1, not {units!r}.")
    if not -array.ndim <= axis < array.ndim:
        raise SondeError(f"units={units}: the values have {array.ndim} dimensions, {array.shape}. Pass 0 to {array.ndim - 1}.")
    moved = np.moveaxis(array, axis, 0)
    return moved.reshape(moved.shape[0], -1)


def activation_heatmap(values: Any, *, name: str, units: int | None = None) -> Plot:
    """An activation of any shape: a square matrix as it is (attention: rows are queries, columns are keys), several square matrices as one
    map each, and everything else as units by positions. With `units`, the dimension of the units, always the last."""
    array = floats(values)
    is_square = array.ndim >= 2 and array.shape[-1] == array.shape[-2] > 1
    if units is None and is_square and array.ndim == 2:
        return heatmap(array, name=name, x_label="column", y_label="row", label="activation")
    # Three dimensions of which two are equal may be a batch of sequences by chance: the rows of attention weights add up to 1.
    if units is None and is_square and (array.ndim > 3 or _is_attention(array)):
        return square_maps(array, name=name)
    return heatmap(units_by_positions(array, units), name=name, x_label="position", y_label="unit", label="activation")


def _is_attention(array: Floats) -> bool:
    rows = array.reshape(-1, array.shape[-1])
    rows = rows[np.isfinite(rows).all(axis=1)]
    return bool(rows.size) and bool((rows >= 0).all()) and bool((np.abs(rows.sum(axis=-1) - 1) < 0.01).all())


def square_maps(array: Floats, *, name: str) -> Plot:
    """The last two dimensions as one map each, with one scale of colors. Of more than MOST_MAPS the first are drawn, but all maps with
    non-finite values before others."""
    flat = array.reshape(-1, *array.shape[-2:])
    is_bad = ~np.isfinite(flat).all(axis=(1, 2))
    order = np.argsort(~is_bad, kind="stable")[:MOST_MAPS]
    chosen = [tuple(map(int, np.unravel_index(at, array.shape[:-2]))) for at in np.sort(order)]
    shown = {index: array[index].copy() for index in chosen}
    drawn = np.array(list(shown.values())).reshape(-1, array.shape[-1])
    warning = f"{bad_text(non_finite(array))} in {is_bad.sum():,} of {counted(len(flat), 'map')}" if is_bad.any() else ""
    data = {
        "kind": "square_maps", "shape": list(array.shape), "maps": {str(list(index)): values for index, values in shown.items()},
        "non_finite": non_finite(array),
    }  # fmt: skip
    columns = min(MAP_COLUMNS, max(len(shown), 1))
    rows = -(-max(len(shown), 1) // columns)
    size = "×".join(map(str, array.shape))
    notes = f"{size}; {len(shown)} of {counted(len(flat), 'map')}" if len(shown) < len(flat) else f"{size}; {counted(len(flat), 'map')}"

    def draw(figure: Figure) -> None:
        style.heading(figure, name, notes, warning)
        if not shown:
            style.show_message(figure.add_subplot(), "no values")
            return
        axis, grid = _around_zero(spread_axis(drawn), drawn), figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, (index, values) in zip(grid, shown.items()):
            _cells(axes, values, axis, aspect="equal")
            axes.set_title(str(list(index)), fontsize=7, loc="left", pad=2)
            axes.set_xticks([])
            axes.set_yticks([])
        for axes in grid[len(shown) :]:
            axes.set_axis_off()
        if np.isfinite(drawn).any():
            _colorbar(figure, grid.tolist(), axis, "activation")

    return Plot(name, draw, data=data, size=(0.6 + 1.5 * columns + 0.8, 0.7 + 1.6 * rows))


def _draw(figure: Figure, name: str, values: Floats, notes: str, caption: str, axis: Axis, row_names: Sequence[str] = ()) -> Axes | None:
    finite = values[np.isfinite(values)]
    if finite.size:
        notes += f"; {range_text(finite)}"
    warning = bad_text(non_finite(values))
    if warning and row_names:
        rows = np.flatnonzero(~np.isfinite(values).all(axis=1))
        warning += " " + place_text([row_names[row] for row in rows.tolist()])
    style.heading(figure, name, notes, warning)
    axes = figure.add_subplot()
    if not values.size:
        style.show_message(axes, "no values")
        return None
    _image(figure, axes, values, _around_zero(axis, values), caption)
    return axes


def _around_zero(axis: Axis, values: Floats) -> Axis:
    """The axis with zero in the middle of the colors where values have both signs."""
    finite = values[np.isfinite(values)]
    if axis.scale == "linear" and finite.size and finite.min() < 0 < finite.max():
        reach = float(np.abs(finite).max())
        return linear_axis(-reach, reach)
    return axis


def _image(figure: Figure, axes: Axes, values: Floats, axis: Axis, caption: str) -> None:
    from matplotlib.patches import Patch

    _cells(axes, values, axis)
    if np.isfinite(values).any():
        _colorbar(figure, axes, axis, caption)
    if not np.isfinite(values).all():
        mark = Patch(facecolor=style.BAD, edgecolor=style.BACKGROUND, hatch="////", linewidth=0, label="not finite")
        axes.legend(handles=[mark], loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=7, borderaxespad=0.2)


def _colors(axis: Axis) -> Any:
    from matplotlib import colormaps

    return colormaps[style.DIVERGING if axis.low < 0 < axis.high and axis.scale != "log" else style.SEQUENTIAL]


def _cells(axes: Axes, values: Floats, axis: Axis, aspect: Any = "auto") -> None:
    from matplotlib.colors import to_rgba

    cells = coarse(values, MOST_CELLS, MOST_CELLS)
    image = _colors(axis)(np.nan_to_num(axis.place(cells), nan=0.0))
    bad = ~np.isfinite(cells)
    image[bad] = to_rgba(style.BAD)
    rows, columns = values.shape
    axes.imshow(image, aspect=aspect, interpolation="nearest", extent=(-0.5, columns - 0.5, rows - 0.5, -0.5))
    axes.spines[:].set_visible(True)
    _hatch(axes, bad, columns / cells.shape[1], rows / cells.shape[0])


def _colorbar(figure: Figure, axes: Any, axis: Axis, caption: str) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    bar = figure.colorbar(ScalarMappable(Normalize(0.0, 1.0), _colors(axis)), ax=axes, fraction=0.05, pad=0.03, aspect=30)
    ticks = axis.ticks(6)
    bar.set_ticks([place for place, _ in ticks], labels=[style.typeset(text) for _, text in ticks])
    bar.set_label(style.safe_text(caption + axis.scale_note), parse_math=False)
    bar.outline.set_visible(False)


def _hatch(axes: Axes, bad: Any, wide: float, high: float) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    patches: list[Rectangle] = []
    for row in np.flatnonzero(bad.any(axis=1)).tolist():
        for start, end in stretches(bad[row]):
            patches.append(Rectangle((start * wide - 0.5, row * high - 0.5), (end + 1 - start) * wide, high))
        if len(patches) > MOST_HATCHED:
            return
    axes.add_collection(PatchCollection(patches, facecolor="none", edgecolor=style.BACKGROUND, hatch="////", linewidth=0))


def row_ticks(axes: Axes, names: Sequence[str], high: float) -> None:
    labels = row_labels(names, max(int((high - 1.2) / 0.13), 6))
    axes.set_yticks([label.middle for label in labels], labels=[style.safe_text(label.text, 34) for label in labels], fontsize=style.TINY)
    style.without_math(axes.get_yticklabels())
    if any(label.last > label.first for label in labels):  # a label for several rows
        axes.tick_params(axis="y", length=0)
        for label in labels[:-1]:
            axes.axhline(label.last + 0.5, color=style.BACKGROUND, linewidth=0.3, alpha=0.6)


def _step_ticks(axes: Axes, steps: Floats) -> None:
    """Columns are observations, which need not be evenly spaced: a tick is at the column of its step."""
    if steps.size == 1:
        axes.set_xticks([0], labels=[f"{steps[0]:g}"])
        return
    across = linear_axis(steps[0], steps[-1])
    ticks = across.ticks(8)
    columns = np.interp(across.values(np.array([place for place, _ in ticks])), steps, np.arange(steps.size))
    axes.set_xticks(columns, labels=[style.typeset(text) for _, text in ticks])


def _edge_marks(axes: Axes, values: Floats) -> None:
    """A red arrow beside each layer with a bad number: among 500 rows one cell alone is easily missed."""
    rows = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if not rows.size:  # even an empty line takes room
        return
    across = axes.get_yaxis_transform()
    axes.plot(np.full(rows.size, 1.012), rows, transform=across, linestyle="none", marker="<", markersize=3, color=style.BAD, clip_on=False)

"""The newest statistics of a run as tables: one row per layer, from input to output."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from sonde.events import Kind, Site
from sonde.formatting import number
from sonde.runlog.reader import Run

COLUMNS = ("mean", "std", "min", "max", "l2", "zeros", "nan", "inf")
TITLES = {
    Kind.ACTIVATION: "Outputs of layers", Kind.ACTIVATION_GRADIENT: "Gradients of outputs", Kind.PARAMETER: "Parameters",
    Kind.GRADIENT: "Gradients of parameters", Kind.UPDATE: "Updates of parameters",
}  # fmt: skip


class StatisticsCell(NamedTuple):
    text: str
    bad: bool = False  # not finite, or nothing but zeros


class StatisticsRow(NamedTuple):
    path: str
    type: str
    cells: tuple[StatisticsCell, ...]


class LayerStatistics(NamedTuple):
    """One kind of tensor at the last step at which it was measured."""

    title: str
    step: int
    rows: tuple[StatisticsRow, ...]

    @property
    def bad(self) -> bool:
        return any(cell.bad for row in self.rows for cell in row.cells)


def last_statistics(run: Run) -> Iterator[LayerStatistics]:
    """One table for each kind of statistics in the run."""
    for kind, title in TITLES.items():
        for frame in deque(run.frames(kind), maxlen=1):
            rows = zip(frame.sites.tolist(), frame.values.T.tolist())
            known = [_row(run.sites[site], dict(zip(frame.fields, row))) for site, row in rows if site in run.sites]
            yield LayerStatistics(title, frame.step, tuple(known))


def _row(site: Site, values: dict[str, float]) -> StatisticsRow:
    path = site.path or "(model)"
    if site.model:
        path = f"{site.model}: {path}"
    if site.call:
        path += f" (call {site.call + 1})"
    if site.item:
        path += f" [{site.item}]"
    num = values.get("num", 0.0)
    if not num:
        return StatisticsRow(path, site.type, (StatisticsCell("none"), *(StatisticsCell("") for _ in COLUMNS[1:])))
    cells = [_cell(name, values.get(name, float("nan")), num) for name in COLUMNS]
    if values.get("nan", 0.0) + values.get("inf", 0.0) >= num:  # the other statistics are of its finite numbers, and it has none
        cells[: COLUMNS.index("nan")] = [StatisticsCell("–")] * COLUMNS.index("nan")
    return StatisticsRow(path, site.type, tuple(cells))


def _cell(name: str, value: float, num: float) -> StatisticsCell:
    if name in ("nan", "inf"):
        return StatisticsCell(number(value), bad=value > 0)
    if name == "zeros":
        return StatisticsCell(f"{value / num:.0%}".replace("%", " %"), bad=value == num)
    return StatisticsCell(number(value), bad=value != value)

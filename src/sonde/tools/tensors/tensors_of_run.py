"""The tensors that a run has measured: statistics and exponents in the last step that has them, for tools without tensors at hand."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sonde.events import Frame, Kind, Site
from sonde.runlog.run_reader import Run
from sonde.tools.tensors.describe_tensor import FastStatistics
from sonde.tools.tensors.floating_point_formats import Magnitudes

Source = Run | Path | str
WHAT = {
    Kind.PARAMETER: "parameter", Kind.GRADIENT: "gradient", Kind.ACTIVATION: "output", Kind.ACTIVATION_GRADIENT: "gradient of output",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """One tensor at the last step in which it was measured."""

    site: Site
    what: str  # one of the values of WHAT
    step: int
    measured: Magnitudes

    @property
    def name(self) -> str:
        """`0.weight`, `gradient of 0.weight`, `output of 0`."""
        return self.site.name if self.what == WHAT[Kind.PARAMETER] else f"{self.what} of {self.site.name or 'the model'}"


def read_last_tensors(run: Source) -> Iterator[RecordedTensor]:
    """Of the lowest rank, by kind."""
    source = run if isinstance(run, Run) else Run(run)
    for kind, what in WHAT.items():
        frame, exponents = (_last(source, each) for each in (kind, kind + Kind.EXPONENTS))
        counts = _exponents(exponents) if exponents is not None else {}
        if frame is None:
            continue
        columns = {name: frame[name].tolist() for name in frame.fields}
        for column, site_id in enumerate(frame.sites.tolist()):
            row = {name: values[column] for name, values in columns.items()}
            if site_id in source.sites and row["num"] > 0:  # 0: there was no tensor
                found = sorted(counts.get(site_id, {}).items())
                magnitudes = Magnitudes(_statistics(row), tuple(each for each, _ in found), tuple(count for _, count in found))
                yield RecordedTensor(source.sites[site_id], what, frame.step, magnitudes)


def _last(run: Run, kind: str) -> Frame | None:
    return next(iter(deque(run.frames(kind), maxlen=1)), None)


def _statistics(row: dict[str, float]) -> FastStatistics:
    return FastStatistics(
        num=int(row["num"]), mean=row["mean"], std=row["std"], min=row["min"], max=row["max"], l1=math.nan, l2=row["l2"],
        zeros=int(row["zeros"]), nan=int(row["nan"]), inf=int(row["inf"]),
    )  # fmt: skip


def _exponents(frame: Frame) -> dict[int, dict[int, int]]:
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for site_id, exponent, count in zip(frame.sites.tolist(), frame["exponent"].tolist(), frame["count"].tolist()):
        found[site_id][int(exponent)] = int(count)
    return found

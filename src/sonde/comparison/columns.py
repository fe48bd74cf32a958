"""The scalars of one training by column, one number per step: what curves, times and counts are compared by.

Of a very long run every second, fourth, eighth … step is kept, by number: two runs that are thinned alike keep equal steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sonde.events import Event, Frame, Kind
from sonde.runlog.format import EVENT, FRAME
from sonde.runlog.reader import Run, RunProcess

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]

MAX_KEPT = 1 << 16  # steps: the median of so many is the median of all of them, and they fit into 20 MB


@dataclass(frozen=True, slots=True)
class Columns:
    """Everything about `steps` that was recorded once per step; `every_step` and `observed` know all steps, the rest may be thinned."""

    every_step: Steps
    observed: npt.NDArray[np.bool_]  # of every step
    steps: Steps
    values: Mapping[str, Floats]  # NaN where a scalar was not recorded
    elapsed_s: Floats  # time of the training at the end of each step, without Sonde's own
    total_s: float
    bad_losses: Mapping[str, frozenset[int]] = field(default_factory=dict)  # by series: steps whose loss was not a finite number

    def column(self, name: str) -> Floats:
        known = self.values.get(name)
        return np.full(len(self.steps), np.nan) if known is None else known

    def losses(self, series: str) -> tuple[Steps, Floats]:
        """The losses that were computed. A NaN is a loss only where the guard saw it; elsewhere no backward was called."""
        values = self.column(series)
        bad = self.bad_losses.get(series, frozenset())
        there = ~np.isnan(values) | np.array([step in bad for step in self.steps.tolist()], np.bool_)
        return self.steps[there], values[there]


def training_of(run: Run, rank: int) -> RunProcess | None:
    """The newest process of a rank that completed a step: what was started again counts as it ended."""
    trained = [process for process in run.processes if process.rank == rank and process.last_step >= 0]
    return trained[-1] if trained else None


def newest_of(run: Run, rank: int) -> RunProcess | None:
    """The newest process of a rank, whether it got anywhere or not."""
    return next((process for process in reversed(run.processes) if process.rank == rank), None)


def read_columns(process: RunProcess) -> Columns:
    every_step, observed = array("q"), bytearray()
    names: list[tuple[str, ...]] = []  # the sets of scalars that steps came with: further losses and rates come later
    kept: list[tuple[int, int, float, Floats]] = []  # step, place in names, time, values
    sites: object = None
    stride, elapsed_ms = 1, 0.0
    for frame in process.contents(FRAME, Kind.STEP):
        assert isinstance(frame, Frame)
        if not frame.fields or (every_step and frame.step <= every_step[-1]):
            continue
        if frame.sites is not sites:  # frames of one plan share them
            sites = frame.sites
            names.append(tuple(process.sites[i].path if i in process.sites else "" for i in frame.sites.tolist()))
            place = {name: column for column, name in enumerate(names[-1])}
        values = frame.values[0]
        every_step.append(frame.step)
        observed.append(bool("observed" in place and values[place["observed"]] == 1))
        elapsed_ms += _own_time(values, place)
        if frame.step % stride == 0:
            kept.append((frame.step, len(names) - 1, elapsed_ms / 1000, values.astype(np.float64)))
            while len(kept) > MAX_KEPT:
                stride *= 2
                kept = [row for row in kept if row[0] % stride == 0]
    steps = np.array([row[0] for row in kept], np.int64)
    return Columns(
        every_step=np.array(every_step, np.int64),
        observed=np.frombuffer(bytes(observed), np.uint8).astype(np.bool_),
        steps=steps,
        values=_by_name(names, kept),
        elapsed_s=np.array([row[2] for row in kept], np.float64),
        total_s=elapsed_ms / 1000,
        bad_losses=_bad_losses(process, frozenset(steps.tolist())),
    )


def _own_time(values: npt.NDArray[np.floating[npt.NBitBase]], place: Mapping[str, int]) -> float:
    if "step_ms" not in place:
        return 0.0
    own = float(values[place["step_ms"]]) - (float(values[place["sonde_ms"]]) if "sonde_ms" in place else 0.0)
    return max(own, 0.0) if np.isfinite(own) else 0.0


def _by_name(names: list[tuple[str, ...]], kept: list[tuple[int, int, float, Floats]]) -> dict[str, Floats]:
    columns: dict[str, Floats] = {}
    for number, some in enumerate(names):
        rows = [index for index, row in enumerate(kept) if row[1] == number]
        if not rows:
            continue
        table = np.array([kept[index][3] for index in rows])
        for column, name in enumerate(some):
            if name:
                whole = columns.setdefault(name, np.full(len(kept), np.nan))
                whole[rows] = table[:, column]
    return columns


def _bad_losses(process: RunProcess, steps: frozenset[int]) -> dict[str, frozenset[int]]:
    found: dict[str, set[int]] = {}
    for event in process.contents(EVENT, "nonfinite"):
        assert isinstance(event, Event)
        if event.data.get("what") == "loss" and event.step in steps:
            found.setdefault(str(event.data.get("where") or "loss"), set()).add(event.step)
    return {series: frozenset(some) for series, some in found.items()}

"""Blocks of observed steps: the statistics of layers, parameters and batches, several steps and several kinds at once.

A `Block` holds steps in a row whose frames have the same sites, so each field is an array (steps x sites). A `Reduction` turns the blocks
of a run, which may not fit into memory, into a small state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from sonde.events import Frame, Site
from sonde.run_view.step_columns import StepTable
from sonde.runlog import record_format as f
from sonde.runlog.log_file_reader import NO_LAYOUT
from sonde.runlog.record_index import Ids, Ints, RecordIndex

Values = npt.NDArray[np.floating[Any]]
State = TypeVar("State")

MAX_BYTES = 4 << 20  # of one block, as far as a single step is not longer
ABSENT = -3  # instead of a layout number: the step has no frame of this kind


class LayerTable:
    """The frames of one kind in the steps of a block. `table["l2"]` is an array (steps x sites), in the order of `site_ids`."""

    def __init__(self, site_ids: Ids, fields: Sequence[str], values: Values, known: Mapping[int, Site]) -> None:
        self.site_ids = site_ids
        self.fields = tuple(fields)
        self._values = values  # (steps, fields, sites)
        self._known = known

    def __getitem__(self, field: str) -> Values:
        column: Values = self._values[:, self.fields.index(field), :]
        return column

    @cached_property
    def sites(self) -> list[Site | None]:
        """The sites in the order of the columns; None for one that the log does not describe."""
        return [self._known.get(number) for number in self.site_ids.tolist()]

    @cached_property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Which columns the log describes."""
        return np.array([site is not None for site in self.sites], dtype=bool)


@dataclass(frozen=True, eq=False)
class Block:
    """Steps in a row whose frames share their layouts."""

    rows: Ints  # indices of these steps in the columns of the view
    steps: StepTable  # of the whole view
    sites: Mapping[int, Site]
    tables: Mapping[str, LayerTable]

    @property
    def numbers(self) -> Ints:
        """The numbers of these steps."""
        return self.steps.numbers[self.rows]

    def scalar(self, name: str) -> npt.NDArray[np.float64]:
        """A step scalar in these steps; NaN where it was not recorded."""
        return self.steps[name][self.rows]

    def counts(self, name: str) -> Ints:
        """A scalar that counts calls, as integers; 0 where it was not recorded."""
        return self.steps.counts(name)[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, kind: str) -> bool:
        return kind in self.tables

    def __getitem__(self, kind: str) -> LayerTable:
        return self.tables[kind]

    def get(self, kind: str) -> LayerTable | None:
        return self.tables.get(kind)


@dataclass(frozen=True, eq=False)
class Reduction(Generic[State]):
    """A function over the blocks of a run: `reduce(block, state)` returns the state after this block."""

    kinds: tuple[str, ...]  # kinds of frames; a block holds those of them that its steps have
    initial: Callable[[], State]
    reduce: Callable[[Block, State], State]


def blocks(
    index: RecordIndex, kinds: Sequence[str], steps: StepTable, sites: Mapping[int, Site], rows: Ints | None = None
) -> Iterator[Block]:
    """The blocks of all complete steps that have a frame of one of these kinds; with `rows`, of these steps only."""
    frames = frame_positions(index, kinds, steps)
    observed = np.flatnonzero((frames >= 0).any(axis=1))
    if rows is not None:
        observed = observed[np.isin(observed, rows)]
    frames = frames[observed]
    for start, stop in _same_layouts(index, frames):
        tables = {
            kind: table
            for column, kind in enumerate(kinds)
            if frames[start, column] >= 0 and (table := _table(index, frames[start:stop, column], sites)) is not None
        }
        yield Block(observed[start:stop], steps, sites, tables)


def frame_positions(index: RecordIndex, kinds: Sequence[str], steps: StepTable) -> Ints:
    """The position of the frame of each step (row) and kind (column) in the index; -1 if the step has none."""
    frames = np.full((len(steps), len(kinds)), -1, np.int64)
    for column, kind in enumerate(kinds):
        positions = index.positions(f.FRAME, kind)
        rows = np.searchsorted(steps.numbers, index.steps[positions])
        is_complete = rows < len(steps)
        rows, positions = rows[is_complete], positions[is_complete]
        # Only frames that were written before the record that completes their step belong to it.
        is_mine = (steps.numbers[rows] == index.steps[positions]) & (steps.positions[rows] > positions)
        frames[rows[is_mine], column] = positions[is_mine]
    return frames


def _same_layouts(index: RecordIndex, frames: Ints) -> Iterator[tuple[int, int]]:
    """Ranges of observed steps whose frames have the same layouts, in one segment, of at most MAX_BYTES."""
    if not len(frames):
        return
    is_there = frames >= 0
    layouts = np.where(is_there, index.layouts[frames], ABSENT)
    segments = np.where(is_there, index.segment_of[frames], ABSENT)
    sizes = np.where(is_there, index.lengths[frames], 0).sum(axis=1)
    is_new = np.ones(len(frames), bool)
    is_new[1:] = (layouts[1:] != layouts[:-1]).any(axis=1) | (segments[1:] != segments[:-1]).any(axis=1)
    is_new |= (layouts == NO_LAYOUT).any(axis=1)
    for first, last in pairwise([*np.flatnonzero(is_new).tolist(), len(frames)]):
        per_block = max(1, MAX_BYTES // max(1, int(sizes[first])))
        for start in range(first, last, per_block):
            yield start, min(start + per_block, last)


def _table(index: RecordIndex, positions: Ints, sites: Mapping[int, Site]) -> LayerTable | None:
    layout = index.layout(int(positions[0]))
    if layout is not None:
        return LayerTable(layout.sites, layout.fields, index.values(positions), sites)
    frame = next((fact for _, fact in index.records(positions) if isinstance(fact, Frame)), None)
    return None if frame is None else LayerTable(frame.sites, frame.fields, frame.values[None], sites)

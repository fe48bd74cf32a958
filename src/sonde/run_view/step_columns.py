"""StepColumns: the scalars of every complete step of one process, one array per scalar.

The arrays grow with the log. A `StepTable` is a snapshot of them: it shares their memory, and rows that are added later are not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sonde.events import Frame, Kind, Site
from sonde.runlog import record_format as f
from sonde.runlog.record_index import Ids, Ints, RecordIndex, same_layout_runs

Floats = npt.NDArray[np.float64]

MAX_BYTES = 4 << 20  # decoded at once
MAX_PARTS = 1000  # different sets of scalars: a real run has a few, a malicious log one per step; the scalars of further ones are not read
MAX_COUNT = 1 << 31  # calls in one step: what is larger is damage, and a sum of them must fit into 64 bits


def power_of_two_stride(num: int, most: int) -> int:
    """The distance at which at most `most` of `num` items are taken: a power of two, so that the choice changes little when a run grows."""
    return 1 << (max(1, -(-num // most)) - 1).bit_length()


class StepColumns:
    """The storage. `extend` decodes what was added to the log."""

    def __init__(self) -> None:
        self._num_seen = 0  # records of the process that were looked through
        self._numbers = _Growing(np.int64)
        self._positions = _Growing(np.int64)
        self._parts: dict[bytes, _Part] = {}  # by the ids of their scalars
        self.num_repeated = 0  # rows that are left out because their step number is not above all numbers before it

    def extend(self, index: RecordIndex) -> None:
        positions = index.positions(f.FRAME, Kind.STEP, start=self._num_seen)
        self._num_seen = len(index)
        numbers = index.steps[positions]
        last = self._numbers.snapshot()[-1:] if self._numbers.num else np.full(1, np.iinfo(np.int64).min)
        is_new = numbers > np.maximum.accumulate(np.concatenate([last, numbers]))[:-1]
        self.num_repeated += int(np.count_nonzero(~is_new))
        positions, first_row = positions[is_new], self._numbers.num
        self._numbers.append(numbers[is_new])
        self._positions.append(positions)
        for start, stop in same_layout_runs(index, positions):
            layout = index.layout(int(positions[start]))
            if layout is None:
                for _, frame in index.records(positions[start:stop]):
                    if isinstance(frame, Frame) and (part := self._part(frame.sites)) is not None:
                        part.add(np.arange(first_row + start, first_row + stop), _first_field(frame.values[None]))
                continue
            if (part := self._part(layout.sites)) is None:
                continue
            part.reserve(stop - start)
            per_read = max(1, MAX_BYTES // layout.num_bytes)
            for at in range(start, stop, per_read):
                chunk = positions[at : min(at + per_read, stop)]
                part.add(np.arange(first_row + at, first_row + at + len(chunk)), _first_field(index.values(chunk)))

    def _part(self, sites: Ids) -> _Part | None:
        key = sites.tobytes()
        if key not in self._parts and len(self._parts) < MAX_PARTS:
            self._parts[key] = _Part(sites)
        return self._parts.get(key)

    def table(self, sites: Mapping[int, Site]) -> StepTable:
        return StepTable(self._numbers.snapshot(), self._positions.snapshot(), [part.snapshot(sites) for part in self._parts.values()])


def _first_field(values: npt.NDArray[np.floating[Any]]) -> Floats:
    """(sites, rows) of frames whose first field is the value; empty frames have no rows of values."""
    if not values.shape[1]:
        return np.full((values.shape[2], values.shape[0]), np.nan)
    return values[:, 0, :].T.astype(np.float64, copy=False)


class _Part:
    """The rows of all steps with the same scalars."""

    def __init__(self, sites: Ids) -> None:
        self.sites = sites
        self._rows = _Growing(np.int64)
        self._values = _Growing(np.float64, len(sites))

    def reserve(self, num_rows: int) -> None:
        self._rows.reserve(num_rows)
        self._values.reserve(num_rows)

    def add(self, rows: Ints, values: Floats) -> None:
        self._rows.append(rows)
        self._values.append(values)

    def snapshot(self, sites: Mapping[int, Site]) -> tuple[dict[str, int], Ints, Floats]:
        names = {sites[site].path: column for column, site in enumerate(self.sites.tolist()) if site in sites}
        return names, self._rows.snapshot(), self._values.snapshot()


class _Growing:
    """An array that grows in its last dimension. Snapshots stay valid: what they show is never written again."""

    def __init__(self, dtype: Any, num_rows: int | None = None) -> None:
        self._array: npt.NDArray[Any] = np.empty((0,) if num_rows is None else (num_rows, 0), dtype)
        self.num = 0

    def reserve(self, num_more: int) -> None:
        if self.num + num_more > self._array.shape[-1]:
            # The first time exactly as much as there is: most logs are read once, after the run.
            capacity = self.num + (max(num_more, self.num // 4) if self.num else num_more)
            larger = np.empty((*self._array.shape[:-1], capacity), self._array.dtype)
            larger[..., : self.num] = self._array[..., : self.num]
            self._array = larger

    def append(self, values: npt.NDArray[Any]) -> None:
        self.reserve(values.shape[-1])
        self._array[..., self.num : self.num + values.shape[-1]] = values
        self.num += values.shape[-1]

    def snapshot(self) -> npt.NDArray[Any]:
        view = self._array[..., : self.num]
        view.flags.writeable = False
        return view


class StepTable:
    """The scalars of the complete steps: `table["loss"]` is an array with one number per step, NaN where a step has none."""

    def __init__(self, numbers: Ints, positions: Ints, parts: list[tuple[dict[str, int], Ints, Floats]]) -> None:
        self.numbers = numbers
        self.positions = positions  # of the step records, in the index of the process
        self._parts = parts
        self._columns: dict[str, Floats] = {}
        self._counts: dict[str, Ints] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[str]:
        """The names, in the order in which they came up."""
        return iter(dict.fromkeys(name for names, _, _ in self._parts for name in names))

    def __contains__(self, name: str) -> bool:
        return any(name in names for names, _, _ in self._parts)

    def __getitem__(self, name: str) -> Floats:
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = self._assemble(name)
        return column

    def _assemble(self, name: str) -> Floats:
        having = [(values[names[name]], rows) for names, rows, values in self._parts if name in names]
        if len(having) == 1 and len(having[0][1]) == len(self):
            only: Floats = having[0][0]
            return only
        column = np.full(len(self), np.nan)
        for values, rows in having:
            column[rows] = values
        column.flags.writeable = False
        return column

    def counts(self, name: str) -> Ints:
        """A scalar that counts calls, as integers; 0 where it was not recorded."""
        if name not in self._counts:
            column = self[name]
            self._counts[name] = np.clip(np.where(np.isfinite(column), column, 0), -MAX_COUNT, MAX_COUNT).astype(np.int64)
        return self._counts[name]

    def is_present(self, name: str) -> npt.NDArray[np.bool_]:
        """In which steps the scalar was recorded, be it as NaN."""
        present = np.zeros(len(self), bool)
        for names, rows, _ in self._parts:
            if name in names:
                present[rows] = True
        return present

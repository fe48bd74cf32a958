"""RecordIndex: where the frames and events of one process are, as arrays with one entry per record in the order of writing."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sonde.events import Event, Frame
from sonde.runlog import record_format as f
from sonde.runlog.log_file_reader import NO_LAYOUT, Segment

Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint32]


class RecordIndex:
    """A snapshot: records that are added later are not in it. A position is an index into its arrays."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = tuple(segments)
        parts = [segment.index() for segment in self._segments]
        self.first_positions = np.cumsum([0, *(len(part.starts) for part in parts)])
        self.segment_of = np.repeat(np.arange(len(parts), dtype=np.int32), np.diff(self.first_positions))
        self._names: list[tuple[int, str]] = []  # record type and kind, by kind number
        self._layouts: list[f.Layout] = []
        kinds, layouts = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
        for segment, part in zip(self._segments, parts):
            kinds.append(self._merged_kinds(part.kind_names)[part.kinds])
            is_known = part.layouts >= 0  # NO_LAYOUT and NOT_A_FRAME stay as they are
            layouts.append(np.where(is_known, part.layouts + len(self._layouts), part.layouts).astype(np.int32))
            self._layouts += segment.layouts
        self._starts: Ints = np.concatenate([np.empty(0, np.int64), *(part.starts for part in parts)])
        self.lengths: Ints = np.concatenate([np.empty(0, np.int64), *(part.lengths for part in parts)])
        self.steps: Ints = np.concatenate([np.empty(0, np.int64), *(part.steps for part in parts)])
        self._kinds, self.layouts = np.concatenate(kinds), np.concatenate(layouts)

    def _merged_kinds(self, names: Sequence[tuple[int, str]]) -> npt.NDArray[np.int32]:
        known = {name: number for number, name in enumerate(self._names)}
        numbers = [known.setdefault(name, len(known)) for name in names]
        self._names = list(known)
        return np.array(numbers, np.int32)

    def __len__(self) -> int:
        return len(self._starts)

    def kinds(self, type_: int) -> list[str]:
        """The kinds of its frames or events."""
        return [kind for of_type, kind in self._names if of_type == type_]

    def positions(self, type_: int, *kinds: str, start: int = 0) -> Ints:
        """The positions of the frames or events of these kinds, from a position on."""
        numbers = [number for number, (of_type, kind) in enumerate(self._names) if of_type == type_ and kind in kinds]
        if not numbers:
            return np.empty(0, np.int64)
        return np.flatnonzero(np.isin(self._kinds[start:], numbers)) + start

    def layout(self, position: int) -> f.Layout | None:
        """The layout of a frame; None if it has to be read from the frame itself."""
        number = int(self.layouts[position])
        return self._layouts[number] if number >= 0 else None

    def values(self, positions: Ints) -> npt.NDArray[np.floating[Any]]:
        """The values of frames that are in one segment and share one known layout: (frames, fields, sites)."""
        layout = self.layout(int(positions[0]))
        assert layout is not None
        segment = self._segments[int(self.segment_of[positions[0]])]
        num_bytes = layout.num_bytes - layout.start
        raw = segment.read_spans(self._starts[positions] + layout.start, num_bytes)
        dtype = np.float32 if layout.value_bytes == 4 else np.float64
        stored: Any = np.frombuffer(raw, f"<f{layout.value_bytes}").astype(dtype, copy=False)
        values: npt.NDArray[np.floating[Any]] = stored.reshape(len(positions), len(layout.fields), len(layout.sites))
        return values

    def records(self, positions: Ints) -> Iterator[tuple[int, Frame | Event]]:
        """The decoded frames and events at these positions. Records that cannot be decoded are omitted; their segment notes the damage."""
        for number, segment in enumerate(self._segments):
            mine = positions[self.segment_of[positions] == number] if len(positions) else positions
            first = int(self.first_positions[number])
            for entry, fact in segment.contents((mine - first).tolist()):
                yield first + entry, fact


def same_layout_runs(index: RecordIndex, positions: Ints) -> Iterator[tuple[int, int]]:
    """Ranges of `positions` (start, stop) that are in one segment and share one known layout. A frame without one is a range of its own."""
    layouts, segments = index.layouts[positions], index.segment_of[positions]
    is_new = np.ones(len(positions), bool)
    is_new[1:] = (layouts[1:] != layouts[:-1]) | (segments[1:] != segments[:-1]) | (layouts[1:] == NO_LAYOUT)
    bounds = [*np.flatnonzero(is_new).tolist(), len(positions)]
    yield from pairwise(bounds)

"""Reads one `.sonde` file: follows its growth, skips and reports damage, and builds an index.

The index holds the position, kind and step of each frame and event in 28 bytes; numbers are read on request. Files are read, never mapped
into memory: truncating a mapped file kills the reader.
"""

import os
import stat
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sonde.errors import SondeError
from sonde.events import Event, Frame, Kind, Site, UnreadableEvent
from sonde.runlog import record_format as f
from sonde.runlog.find_record_boundaries import RecordSpan, scan

WINDOW = 4 << 20  # bytes read at a time, or the length of the longest record
MAX_LAYOUT_BYTES = 32 << 20  # of distinct constant parts in memory; further frames are decoded completely
NOT_A_FRAME, NO_LAYOUT = -2, -1  # in the index, instead of a layout number


Column = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a run that could not be read, and why."""

    file: Path
    offset: int
    num_bytes: int
    reason: str


class SegmentIndex(NamedTuple):
    """One array entry per frame or event."""

    starts: npt.NDArray[np.int64]  # of the payload, in the file
    lengths: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.int64]  # index into kind_names
    steps: npt.NDArray[np.int64]
    layouts: npt.NDArray[np.int32]  # index into the layouts of the segment, NO_LAYOUT or NOT_A_FRAME
    kind_names: list[tuple[int, str]]  # record type and kind


class Segment:
    """A file, its index and its metadata as far as it has been read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self.manifest: dict[str, Any] = {}
        self.sites: dict[int, Site] = {}
        self.gaps: list[f.Gap] = []
        self.damage: list[Damage] = []
        self.torn: Damage | None = None  # an incomplete record at the end
        self.end: Event | None = None
        self.last_step = -1
        self.num_unknown = 0  # complete records of a type that this version does not know
        self.num_unreadable_events = 0  # events with a value of the wrong type
        self._version = (0, 0)  # size and modification time at the last read
        self._offset = 0
        self._wanted = 0
        self._kind_numbers: dict[tuple[int, str], int] = {}
        self._fields: dict[str, dict[tuple[str, ...], None]] = {}
        self._layout_numbers: dict[bytes, int] = {}
        self._layouts: list[f.Layout] = []
        self._num_layout_bytes = 0
        self._starts = array("q")
        self._lengths = array("I")
        self._kinds = array("I")
        self._steps = array("q")
        self._layout_of = array("i")

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def size(self) -> int:
        """Bytes of the file when it was read last."""
        return self._version[0]

    # ---- reading new records

    def refresh(self) -> int:
        """Read records that were added. Returns the number of new frames and events."""
        before = len(self)
        try:
            with self._opened() as fd:
                status = os.fstat(fd)
                size, version = status.st_size, (status.st_size, status.st_mtime_ns)
                if version == self._version:
                    return 0
                if size < self._offset:  # truncated by another program, because the writer cuts off only incomplete records: start again
                    self._reset()
                    before = 0
                self._read(fd, size)
                self._version = version
        except OSError as error:
            self._add_damage(0, 0, error.strerror or str(error))
        return len(self) - before

    def _read(self, fd: int, size: int) -> None:
        self.torn = None
        if self._offset == 0 and not self._read_header(fd, size):
            return
        while self._offset < size:
            length = min(max(WINDOW, self._wanted - self._offset), size - self._offset)
            window = _read_at(fd, length, self._offset)
            at_end = self._offset + len(window) >= size or len(window) < length
            result = scan(window, at_end=at_end)
            base = self._offset
            for lost in result.damage:
                self._add_damage(base + lost.start, lost.end - lost.start, lost.reason)
            for found in result.records:
                try:
                    self._process_record(found, window[found.start : found.end], base)
                except f.FormatError as error:
                    self._add_damage(base + found.start, found.end - found.start, str(error))
            self._offset = base + result.offset
            self._wanted = base + result.wanted
            if at_end:
                break
        if self._offset < size:
            self.torn = Damage(self.path, self._offset, size - self._offset, "not complete")

    def _read_header(self, fd: int, size: int) -> bool:
        start = _read_at(fd, f.HEADER_BYTES, 0)
        if len(start) < f.HEADER_BYTES and f.header().startswith(start):
            self.torn = Damage(self.path, 0, size, "not complete") if start else None
            return False
        version = f.version_of(start)
        if version is not None and version > f.FORMAT:
            raise SondeError(
                f"{self.path} is a run of format {version}; this version reads up to {f.FORMAT}. Upgrade with: pip install -U sonde"
            )
        self._offset = f.HEADER_BYTES if version is not None else 0
        return True

    def _process_record(self, found: RecordSpan, payload: bytes, base: int) -> None:
        if found.type == f.FRAME:
            step, key = f.step_and_constant_part(payload)
            number, layout = self._layout(payload, key)
            self._index(base + found.start, payload, f.FRAME, layout.kind, step, number)
            if layout.kind == Kind.STEP:
                self.last_step = max(self.last_step, step)
        elif found.type == f.EVENT:
            event, _ = f.event(payload)
            self._index(base + found.start, payload, f.EVENT, event.kind, event.step, NOT_A_FRAME)
            self.num_unreadable_events += isinstance(event.typed, UnreadableEvent)
            if event.kind == "end":
                self.end = event
        elif found.type == f.SITES:
            self.sites |= {site.id: site for site in f.sites(payload)}
        elif found.type == f.GAP:
            self.gaps.append(f.gap(payload))
        elif found.type == f.MANIFEST:
            content = f.parse_json(payload)
            if not isinstance(content, dict):
                raise f.FormatError("a manifest that is not an object")
            self.manifest = self.manifest or content
        else:
            self.num_unknown += 1

    def _index(self, start: int, payload: bytes, type_: int, kind: str, step: int, layout: int) -> None:
        self._starts.append(start)
        self._lengths.append(len(payload))
        self._kinds.append(self._kind_numbers.setdefault((type_, kind), len(self._kind_numbers)))
        self._steps.append(step)
        self._layout_of.append(layout)

    def _layout(self, payload: bytes, key: bytes) -> tuple[int, f.Layout]:
        number = self._layout_numbers.get(key, NO_LAYOUT)
        if number != NO_LAYOUT:
            if self._layouts[number].num_bytes != len(payload):
                raise f.FormatError("a frame whose values do not fit its length")
            return number, self._layouts[number]
        layout = f.layout(payload)
        self._fields.setdefault(layout.kind, {})[layout.fields] = None
        if self._num_layout_bytes + len(key) <= MAX_LAYOUT_BYTES:
            self._num_layout_bytes += len(key)
            number = self._layout_numbers[key] = len(self._layouts)
            self._layouts.append(layout)
        return number, layout

    def _add_damage(self, offset: int, num_bytes: int, reason: str) -> None:
        last = self.damage[-1] if self.damage else None
        if last is not None and last.offset + last.num_bytes == offset and num_bytes:
            self.damage[-1] = Damage(self.path, last.offset, last.num_bytes + num_bytes, last.reason)
        elif (note := Damage(self.path, offset, num_bytes, reason)) not in self.damage[-8:]:
            self.damage.append(note)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        # The name may be that of a pipe, which must not block, a device, which must not be opened, or a link to another directory.
        if not stat.S_ISREG(os.lstat(self.path).st_mode):
            raise OSError(0, "not a regular file")
        fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(0, "not a regular file")
            yield fd
        finally:
            os.close(fd)

    # ---- reading contents

    def index(self) -> SegmentIndex:
        """Where each frame and event is, in the order of writing."""
        return SegmentIndex(
            np.array(self._starts, np.int64),
            np.array(self._lengths, np.int64),
            np.array(self._kinds, np.int64),
            np.array(self._steps, np.int64),
            np.array(self._layout_of, np.int32),
            list(self._kind_numbers),
        )

    @property
    def layouts(self) -> Sequence[f.Layout]:
        """The layouts of its frames, by the numbers of the index."""
        return self._layouts

    def read_spans(self, starts: npt.NDArray[np.int64], length: int) -> bytes:
        """`length` bytes from each of these offsets, joined. Bytes that the file has lost meanwhile are FF, which are NaN in a float."""
        parts: list[bytes] = []
        window, base, end = b"", 0, int(starts[-1]) + length
        try:
            with self._opened() as fd:
                for start in starts.tolist():
                    if start < base or start + length > base + len(window):
                        window, base = _read_at(fd, max(length, min(WINDOW, end - start)), start), start
                    parts.append(window[start - base : start - base + length])
        except OSError as error:
            self._add_damage(0, 0, error.strerror or str(error))
        joined = b"".join(parts)
        if len(joined) == length * len(starts):
            return joined
        self._add_damage(int(starts[0]), 0, "truncated while it was read")
        return b"".join(part.ljust(length, b"\xff") for part in parts).ljust(length * len(starts), b"\xff")

    def kinds(self, type_: int) -> list[str]:
        """The kinds of its frames or events."""
        return [kind for of_type, kind in self._kind_numbers if of_type == type_]

    def fields_of(self, kind: str) -> list[tuple[str, ...]]:
        """The different field lists of the frames of this kind."""
        return list(self._fields.get(kind, ()))

    def entries(self, type_: int, kind: str) -> list[int]:
        """The index entries of one kind of frame or event."""
        number = self._kind_numbers.get((type_, kind))
        return [] if number is None else np.flatnonzero(np.array(self._kinds, dtype=np.uint32) == number).tolist()

    def contents(self, entries: Sequence[int], *, ahead: int = 0) -> Iterator[tuple[int, Frame | Event]]:
        """The frames and events of these entries, in order. `ahead` is the number of bytes to read at once."""
        for entry, payload in self._payloads(entries, ahead):
            try:
                number = self._layout_of[entry]
                if number == NOT_A_FRAME:
                    yield entry, f.event(payload)[0]
                else:
                    yield entry, f.frame(payload, self._layouts[number] if number != NO_LAYOUT else None)
            except f.FormatError as error:
                self._add_damage(self._starts[entry], self._lengths[entry], str(error))

    def column(self, kind: str, field: str, sites: Sequence[int]) -> Column:
        """Steps and values of one field at the first of these sites that a frame has, without reading other values."""
        steps, values = array("q"), array("d")
        positions: dict[int, tuple[int, str] | None] = {}  # by layout number
        entries = self.entries(f.FRAME, kind)
        try:
            with self._opened() if entries else nullcontext(-1) as fd:
                for entry in entries:
                    number, start, length = self._layout_of[entry], self._starts[entry], self._lengths[entry]
                    if number not in positions or number == NO_LAYOUT:
                        layout = self._layouts[number] if number != NO_LAYOUT else f.layout(_read_at(fd, length, start))
                        positions[number] = _value_position(layout, field, sites)
                    if (position := positions[number]) is None:
                        continue
                    offset, dtype = position
                    raw = os.pread(fd, int(dtype[-1]), start + offset)
                    if len(raw) == int(dtype[-1]):
                        steps.append(self._steps[entry])
                        values.append(float(np.frombuffer(raw, dtype)[0]))
                    else:
                        self._add_damage(start, length, "truncated while it was read")
        except (OSError, f.FormatError) as error:  # FormatError: the file was changed after it was indexed
            self._add_damage(0, 0, str(getattr(error, "strerror", None) or error))
        return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)

    def _payloads(self, entries: Sequence[int], ahead: int) -> Iterator[tuple[int, bytes]]:
        if not len(entries):
            return
        try:
            with self._opened() as fd:
                window, base = b"", 0
                for entry in entries:
                    start, length = self._starts[entry], self._lengths[entry]
                    if start < base or start + length > base + len(window):
                        window, base = _read_at(fd, max(length, ahead), start), start
                    payload = window[start - base : start - base + length]
                    if len(payload) == length:
                        yield entry, payload
                    else:
                        self._add_damage(start, length, "truncated while it was read")
        except OSError as error:
            self._add_damage(0, 0, error.strerror or str(error))


def _value_position(layout: f.Layout, field: str, sites: Sequence[int]) -> tuple[int, str] | None:
    """Offset in a payload and dtype of the field at the first of these sites; None if the layout has none of them."""
    if field not in layout.fields:
        return None
    for site in sites:
        columns = np.flatnonzero(layout.sites == site)
        if len(columns):
            index = layout.fields.index(field) * len(layout.sites) + int(columns[0])
            return layout.start + layout.value_bytes * index, f"<f{layout.value_bytes}"
    return None


def _read_at(fd: int, length: int, offset: int) -> bytes:
    parts = []
    while length > 0 and (part := os.pread(fd, length, offset)):
        parts.append(part)
        length -= len(part)
        offset += len(part)
    return b"".join(parts)

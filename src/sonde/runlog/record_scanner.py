"""Finding the records in bytes that may be cut off, damaged or hostile.

A record counts when its checksum holds. What follows the last one is either *unfinished* (a record that begins here and
may still be completed: wait) or *damage* (bytes that can never become a record: skip them, say so, go on at the next
marker). Time is linear in the input, whatever the input is.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from sonde.runlog.format import MARKER, MAX_PAYLOAD, RECORD_BYTES

# Bytes whose checksum may fail, in lengths of the buffer, before its rest is given up. A flipped bit costs one record's
# length at most, so real damage stays near 1; markers forged one inside the other would cost the square of the file.
PATIENCE = 8
PATIENCE_FLOOR = 1 << 20
USUAL_LENGTH = 64 << 10  # bytes: records up to here are simply tried

_HEAD = struct.Struct("<4sB3sII")


class Found(NamedTuple):
    """A whole record: where its payload lies in the buffer."""

    type: int
    start: int
    end: int


class Lost(NamedTuple):
    """Bytes that are no record."""

    start: int
    end: int
    reason: str


class Scan(NamedTuple):
    records: list[Found]
    damage: list[Lost]
    offset: int  # everything before it is settled: scan again from here
    wanted: int  # how far the buffer must reach for that to be worth while


def scan(buffer: bytes, offset: int = 0, *, at_end: bool = True) -> Scan:
    """All whole records from `offset` on. `at_end` says that the buffer ends where the file ends."""
    return _Scanner(buffer, at_end).run(offset)


class _Scanner:
    __slots__ = ("_at_end", "_buffer", "_checked", "_damage", "_num_failed", "_patience", "_records", "_view")

    def __init__(self, buffer: bytes, at_end: bool) -> None:
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._at_end = at_end
        self._records: list[Found] = []
        self._damage: list[Lost] = []
        self._checked: tuple[int, Found | None] = (-1, None)  # last answer of _whole_record: nothing is summed twice
        self._num_failed = 0
        self._patience = PATIENCE * len(buffer) + PATIENCE_FLOOR

    def run(self, position: int) -> Scan:
        buffer, size = self._buffer, len(self._buffer)
        while position < size:
            position = self._run_of_records(position)
            if position == size:
                break
            if self._num_failed > self._patience:
                self._lose(position, size, "forged: records inside records")
                position = size
                break
            if not buffer.startswith(MARKER, position):
                until = buffer.find(MARKER, position)
                until = until if until >= 0 else max(position, size - _begun_marker(buffer))
                if until == position:
                    break
                self._lose(position, until, "not a record")
                position = until
                continue
            if position + RECORD_BYTES > size:
                return self._settled(position, position + RECORD_BYTES)
            length = int.from_bytes(buffer[position + 8 : position + 12], "little")
            end = position + RECORD_BYTES + length
            if length > MAX_PAYLOAD:
                self._lose(position, position + len(MARKER), "an impossible length")
                position += len(MARKER)
                continue
            # A marker inside means a damaged length (or, once in four billion bytes, chance). If a whole record is
            # there this one is none, and there is no need to sum up the megabytes that its length claims.
            inside = buffer.find(MARKER, position + len(MARKER), min(end, size))
            if inside >= 0 and self._whole_record(inside) is None:
                inside = self._next_whole_record(inside) if end > size and self._at_end else -1
            if inside >= 0:
                self._lose(position, inside, "a record that was cut off")
                position = inside
            elif end > size:
                return self._settled(position, end)
            elif (found := self._whole_record(position)) is not None:
                self._records.append(found)
                position = end
            else:
                self._lose(position, position + len(MARKER), "a checksum that does not hold")
                position += len(MARKER)
        return self._settled(position, size + 1)

    def _run_of_records(self, position: int) -> int:
        """The way through an undamaged file, which is nearly all of every file: one whole record after the other."""
        buffer, view, size, append = self._buffer, self._view, len(self._buffer), self._records.append
        unpack, crc32 = _HEAD.unpack_from, zlib.crc32
        while position + RECORD_BYTES <= size:
            marker, type_, _, length, check = unpack(buffer, position)
            start = position + RECORD_BYTES
            end = start + length
            if marker != MARKER or length > USUAL_LENGTH or end > size:
                break
            if crc32(view[start:end], crc32(view[position + 4 : position + 12])) != check:
                self._num_failed += length
                break
            append(Found(type_, start, end))
            position = end
        return position

    def _settled(self, offset: int, wanted: int) -> Scan:
        return Scan(self._records, self._damage, offset, wanted)

    def _lose(self, start: int, end: int, reason: str) -> None:
        if self._damage and self._damage[-1].end == start:
            start, _, reason = self._damage.pop()
        self._damage.append(Lost(start, end, reason))

    def _whole_record(self, at: int) -> Found | None:
        """The record at this marker, if it is complete and undamaged."""
        if self._checked[0] == at:
            return self._checked[1]
        found = None
        if at + RECORD_BYTES <= len(self._buffer):
            _, type_, _, length, check = _HEAD.unpack_from(self._buffer, at)
            start, end = at + RECORD_BYTES, at + RECORD_BYTES + length
            if length <= MAX_PAYLOAD and end <= len(self._buffer):
                if zlib.crc32(self._view[start:end], zlib.crc32(self._view[at + 4 : at + 12])) == check:
                    found = Found(type_, start, end)
                else:
                    self._num_failed += length
        self._checked = (at, found)
        return found

    def _next_whole_record(self, at: int) -> int:
        """The first whole record after this marker, or -1: nothing follows a record that is still being written."""
        while self._num_failed <= self._patience and (at := self._buffer.find(MARKER, at + len(MARKER))) >= 0:
            if self._whole_record(at) is not None:
                return at
        return -1


def _begun_marker(buffer: bytes) -> int:
    """How many bytes at the very end may be the beginning of a marker."""
    return next((length for length in (3, 2, 1) if buffer.endswith(MARKER[:length])), 0)

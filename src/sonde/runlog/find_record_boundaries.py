"""Finds the records in bytes that may be truncated, damaged or malicious.

A record is valid if its checksum is. The bytes after the last one are either *incomplete* (the start of a record that may still be
completed) or *damage* (bytes that can never become a record: they are reported, and scanning continues at the next marker). The time is
linear in the input.
"""

import struct
import zlib
from typing import NamedTuple

from sonde.runlog.record_format import MARKER, MAX_PAYLOAD, RECORD_BYTES

# Bytes with a failing checksum, in lengths of the buffer, before the rest is skipped. A flipped bit costs at most the length of one record,
# so real damage stays near 1; markers forged inside each other would take quadratic time.
MAX_FAILED = 8
MIN_FAILED_BYTES = 1 << 20
USUAL_LENGTH = 64 << 10  # bytes: longer records are searched for markers before their checksum is computed

_HEAD = struct.Struct("<4sB3sII")


class RecordSpan(NamedTuple):
    """A valid record and the position of its payload in the buffer."""

    type: int
    start: int
    end: int


class DamagedSpan(NamedTuple):
    """Bytes that are not part of a valid record."""

    start: int
    end: int
    reason: str


class ScanResult(NamedTuple):
    """The valid records and the damage of a buffer."""

    records: list[RecordSpan]
    damage: list[DamagedSpan]
    offset: int  # everything before it is final: the next scan starts here
    wanted: int  # length of the buffer that the next scan needs


def scan(buffer: bytes, offset: int = 0, *, at_end: bool = True) -> ScanResult:
    """All valid records from `offset` on. `at_end`: the buffer ends at the end of the file."""
    return _Scanner(buffer, at_end).run(offset)


class _Scanner:
    """State of one scan."""

    __slots__ = ("_at_end", "_buffer", "_checked", "_damage", "_max_failed", "_num_failed", "_records", "_view")

    def __init__(self, buffer: bytes, at_end: bool) -> None:
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._at_end = at_end
        self._records: list[RecordSpan] = []
        self._damage: list[DamagedSpan] = []
        self._checked: tuple[int, RecordSpan | None] = (-1, None)  # last result of _whole_record: no checksum is computed twice
        self._num_failed = 0
        self._max_failed = MAX_FAILED * len(buffer) + MIN_FAILED_BYTES

    def run(self, position: int) -> ScanResult:
        buffer, size = self._buffer, len(self._buffer)
        while position < size:
            position = self._run_of_records(position)
            if position == size:
                break
            if self._num_failed > self._max_failed:
                self._add_damage(position, size, "forged: records inside records")
                position = size
                break
            if not buffer.startswith(MARKER, position):
                until = buffer.find(MARKER, position)
                until = until if until >= 0 else max(position, size - _begun_marker(buffer))
                if until == position:
                    break
                self._add_damage(position, until, "not a record")
                position = until
                continue
            if position + RECORD_BYTES > size:
                return self._result(position, position + RECORD_BYTES)
            length = int.from_bytes(buffer[position + 8 : position + 12], "little")
            end = position + RECORD_BYTES + length
            if length > MAX_PAYLOAD:
                self._add_damage(position, position + len(MARKER), "an impossible length")
                position += len(MARKER)
                continue
            # A marker inside means a damaged length (or, once in four billion bytes, chance). If it starts a valid record, the outer
            # one is damaged, and its checksum over possibly megabytes need not be computed.
            inside = buffer.find(MARKER, position + len(MARKER), min(end, size))
            if inside >= 0 and self._whole_record(inside) is None:
                inside = self._next_whole_record(inside) if end > size and self._at_end else -1
            if inside >= 0:
                self._add_damage(position, inside, "a record that was cut off")
                position = inside
            elif end > size:
                return self._result(position, end)
            elif (found := self._whole_record(position)) is not None:
                self._records.append(found)
                position = end
            else:
                self._add_damage(position, position + len(MARKER), "a checksum that does not hold")
                position += len(MARKER)
        return self._result(position, size + 1)

    def _run_of_records(self, position: int) -> int:
        """The fast path for undamaged bytes: reads valid records one after the other."""
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
            append(RecordSpan(type_, start, end))
            position = end
        return position

    def _result(self, offset: int, wanted: int) -> ScanResult:
        return ScanResult(self._records, self._damage, offset, wanted)

    def _add_damage(self, start: int, end: int, reason: str) -> None:
        if self._damage and self._damage[-1].end == start:
            start, _, reason = self._damage.pop()
        self._damage.append(DamagedSpan(start, end, reason))

    def _whole_record(self, at: int) -> RecordSpan | None:
        """The record at this marker, if it is complete and its checksum is valid."""
        if self._checked[0] == at:
            return self._checked[1]
        found = None
        if at + RECORD_BYTES <= len(self._buffer):
            _, type_, _, length, check = _HEAD.unpack_from(self._buffer, at)
            start, end = at + RECORD_BYTES, at + RECORD_BYTES + length
            if length <= MAX_PAYLOAD and end <= len(self._buffer):
                if zlib.crc32(self._view[start:end], zlib.crc32(self._view[at + 4 : at + 12])) == check:
                    found = RecordSpan(type_, start, end)
                else:
                    self._num_failed += length
        self._checked = (at, found)
        return found

    def _next_whole_record(self, at: int) -> int:
        """The position of the first valid record after this marker, or -1: nothing follows a record that is still being written."""
        while self._num_failed <= self._max_failed and (at := self._buffer.find(MARKER, at + len(MARKER))) >= 0:
            if self._whole_record(at) is not None:
                return at
        return -1


def _begun_marker(buffer: bytes) -> int:
    """The number of bytes at the end that may be the start of a marker."""
    return next((length for length in (3, 2, 1) if buffer.endswith(MARKER[:length])), 0)

"""Writer: appends the records of one process to its own file, without raising errors into the training.

Records are collected during a step and written by one `os.write` at its end: what a write has accepted survives the death of the process.
After the constructor no method raises. Records that cannot be written are counted, and a gap record is written as soon as writing works
again, with the events among them. Where the disk is still full at the end, the last steps of the file make room for it. Before each write
the descriptor is checked: the script may have closed it, and opened a file of its own with the same number.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonde.events import encode
from sonde.runlog import record_format as f
from sonde.runlog.is_writer_running import process_identity
from sonde.runlog.own_descriptor import close_own, file_identity, move_apart
from sonde.runlog.record_format import FramePlan, Gap
from sonde.runlog.run_directory import not_writable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from sonde.events import Site, TypedEvent

SEGMENT_BYTES = 128 << 20  # then a new file: finished segments can be moved away during the training
PENDING_BYTES = 8 << 20  # a step that collects more flushes before its end, to bound the memory
UNLINKED_CHECK = 256  # flushes between two checks that the file has not been deleted
UNWRITTEN_BYTES = 8 << 10  # of the first events that could not be written: the first bad numbers and their causes are among them
ROOM_BYTES = 4 << 10  # freed beside what is written at the end: file systems give out whole blocks
LAST_WRITES = 256  # whose lengths are known, so that the file can be cut between two of them
FULL = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})
EXACT_KINDS = frozenset({"step", "batch"})  # losses and hashes are stored in double precision

_write = os.write  # the only function that writes: tests replace it to inject faults
_log = logging.getLogger("sonde")


class Writer:
    """One process's file in a run directory. In a forked child every method does nothing."""

    def __init__(
        self,
        directory: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        manifest: Mapping[str, Any] | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._directory = Path(directory)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: a signal handler may log during a flush
        self._pending: list[bytes] = []  # whole records
        self._num_pending_bytes = 0
        self._sites: list[Site] = []
        self._sites_missing = False  # some are not on the disk: all are written again
        self._gap: Gap | None = None
        self._unwritten_events: list[bytes] = []  # dropped, and written again with the gap
        self._last_writes: deque[tuple[int, int, bytes]] = deque(maxlen=LAST_WRITES)  # bytes, records, the last record
        self._is_full = False  # the last write failed because of that
        self._steps_of_children = memoryview(mmap.mmap(-1, 8)).cast("q")  # shared with forked children
        self._num_dropped = 0
        self._warned = False
        self._segment = 0
        self._segment_bytes = segment_bytes
        self._num_flushes = 0
        self._manifest = dict(manifest or {})
        self._fd = -1
        try:
            self._manifest |= {
                "format": f.FORMAT,
                "rank": rank,
                "world_size": world_size,
                "started": time.time(),
                "attempt": _num_earlier_processes(self._directory, rank),
                **process_identity(),
            }
            start = f.header() + f.manifest_record(self._manifest)
            host = re.sub(r"[^A-Za-z0-9]+", "_", str(self._manifest["host"]))[:40]
            self._stem = f"rank{rank}-{host}-{self._pid}-{time.time_ns():x}"
            while self._fd < 0:
                try:
                    self._fd, self.path = self._create(0)
                except FileExistsError:  # another container with this host name and process id, in the same nanosecond
                    self._stem = f"{self._stem[:100]}{secrets.token_hex(4)}"
            if _write(self._fd, start) != len(start):
                raise OSError(28, "no space left on the device")
        except OSError as error:
            if self._fd >= 0:
                _quietly(os.close, self._fd)
                _quietly(os.unlink, self.path)
            raise not_writable(self._directory, error) from error
        self._identity = file_identity(self._fd)
        self._size = len(start)  # decides only when a new segment starts

    @property
    def num_dropped(self) -> int:
        """Number of records that could not be written so far."""
        return self._num_dropped

    @property
    def unwritten_gap(self) -> Gap | None:
        """Dropped records that no gap record in the run mentions, because nothing could be written after them."""
        return self._gap

    @property
    def num_steps_of_children(self) -> int:
        """Steps that forked children have trained so far; nothing else of them is recorded."""
        return self._steps_of_children[0]

    def count_step_of_child(self) -> None:
        """Called in a forked child of the training process."""
        self._steps_of_children[0] += 1

    # ---- collecting

    def plan(self, kind: str, fields: Sequence[str], site_ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> FramePlan:
        """The plan for `frame`, created once for all steps that measure the same sites."""
        try:
            return FramePlan(kind, fields, site_ids, exact=kind in EXACT_KINDS)
        except Exception as error:
            self._count_dropped(0, -1, f"the {f.capped(kind)} frame cannot be written: {error}")
            return FramePlan("", (), (), exact=True)  # fits no rows, so its frames are counted as dropped

    def frame(self, plan: FramePlan, step: int, rows: npt.NDArray[np.float64], time_ns: int = 0) -> None:
        """Add a frame: one row per site, one column per field."""
        self._add(step, plan.encode, step, time_ns, rows)

    def column(self, plan: FramePlan, step: int, values: Sequence[float], time_ns: int = 0, *, flush: bool = False) -> None:
        """Add a frame with one field, one number per site; with `flush`, it and all before it are written at once."""
        self._add(step, plan.encode_column, step, time_ns, values, flush=flush)

    def sites(self, sites: Sequence[Site]) -> None:
        """Add sites, before the first frame that measures them."""
        if os.getpid() != self._pid or not sites:
            return
        try:
            self._sites.extend(sites)
            for record in f.sites_records(sites):
                self.put(record)
        except Exception as error:
            self._count_dropped(1, -1, str(error))

    def emit(self, event: TypedEvent, step: int) -> None:
        """Add a typed event."""
        self._add(step, _encode_event, event, step)

    def event(self, kind: str, step: int, data: Mapping[str, Any]) -> None:
        """Add an event by its kind and data; `emit` is the same for a typed event."""
        self._add(step, f.event_record, kind, step, time.time_ns(), data)

    def _add(self, step: int, encode_record: Callable[..., bytes], *arguments: Any, flush: bool = False) -> None:
        """Encode a record and add it; one that cannot be encoded is counted as dropped."""
        if os.getpid() != self._pid:
            return
        try:
            self.put(encode_record(*arguments), flush=flush)
        except Exception as error:
            self._count_dropped(1, step, str(error))

    def put(self, record: bytes, *, flush: bool = False) -> None:
        """Add an encoded record; with `flush`, it and all before it are written at once."""
        if os.getpid() == self._pid:
            with self._lock:
                self._pending.append(record)
                self._num_pending_bytes += len(record)
                if flush or self._num_pending_bytes > PENDING_BYTES:
                    self._flush()

    # ---- writing

    def flush(self) -> None:
        """Write everything since the last flush: once per step."""
        if os.getpid() == self._pid and self._pending:
            with self._lock:
                self._flush()

    def wait(self, seconds: float) -> bool:
        """Whether the file can be written before the process ends. If another thread hangs in a write for `seconds`, returns False and
        disables the writer, so that the process does not wait for a disk that does not respond."""
        if self._lock.acquire(timeout=seconds):
            self._lock.release()
            return True
        self._pid = -1
        return False

    def close(self) -> None:
        """Flush and close the file. Later calls do nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._pending or self._gap:
                self._flush()
            if self._gap and self._is_full:
                _quietly(self._make_room)
                self._flush()
            fd, self._fd, self._pid = self._fd, -1, -1
        close_own(fd, self._identity)

    def _flush(self) -> None:
        records, self._pending, self._num_pending_bytes = self._pending, [], 0
        if not records and self._gap is None:
            return
        num_repeated = num_written = 0
        reason = ""
        try:
            self._check_descriptor()
            if self._size > self._segment_bytes:
                self._start_segment()
            if self._gap is not None:
                recovery = self._recovery()
                num_repeated, records = len(recovery), recovery + records
            chunk = b"".join(records)
            num_written = _write(self._fd, chunk)
            while 0 < num_written < len(chunk):  # usually a full disk: the next call raises the reason
                num_more = _write(self._fd, chunk[num_written:])
                if num_more <= 0:
                    break
                num_written += num_more
            self._size += num_written
            if num_written == len(chunk):
                self._last_writes.append((num_written, len(records), records[-1]))
                if num_repeated:
                    self._gap, self._sites_missing, self._unwritten_events = None, False, []
                return
            reason = "short write"
        except Exception as error:
            self._is_full = isinstance(error, OSError) and error.errno in FULL
            reason = str(error) or type(error).__name__
        except BaseException:  # Ctrl-C: unknown whether the write succeeded, so it counts as dropped
            self._handle_failed_write(records, num_repeated, 0, "interrupted")
            raise
        self._handle_failed_write(records, num_repeated, num_written, reason)

    def _handle_failed_write(self, records: list[bytes], num_repeated: int, num_written: int, reason: str) -> None:
        """After a failed write: cut off the incomplete record and count the dropped ones."""
        end = 0
        for index, record in enumerate(records):
            if end + len(record) > num_written:
                break
            end += len(record)
            if index == 0 and num_repeated:
                self._gap = None  # the gap record itself was written
            if index + 1 == num_repeated:
                self._sites_missing, self._unwritten_events = False, []
        else:
            return
        if num_written > end:
            # Whole records stay, so no reader loses one. If the file cannot be cut, readers resynchronize at the next marker.
            _quietly(self._truncate, num_written - end)
        if end:
            self._last_writes.append((end, index, records[index - 1]))
        lost_repeated = max(0, num_repeated - index)  # these are written again later, so they are not dropped
        for record in records[index + lost_repeated :]:
            self._count_dropped(1, _step_of(record), reason)
            self._sites_missing |= record[4] == f.SITES
            if record[4] == f.EVENT:
                if sum(map(len, self._unwritten_events)) > UNWRITTEN_BYTES:
                    self._unwritten_events.pop()  # the newest one takes its place: it may be the end of the run
                self._unwritten_events.append(record)
        if lost_repeated and self._gap is None:  # the gap was written, the repeated sites were not
            self._count_dropped(1, -1, reason)

    def _recovery(self) -> list[bytes]:
        """What is written before anything else after records were dropped."""
        gap = [] if self._gap is None else [f.gap_record(self._gap)]
        return [*gap, *(f.sites_records(self._sites) if self._sites_missing else ()), *self._unwritten_events]

    def _make_room(self) -> None:
        """Cut the last writes off the file, so that the gap, the events and the end of the run fit into a full disk."""
        self._check_descriptor()
        self._sites_missing = True  # some of them may be among what is cut off
        most = os.fstat(self._fd).st_size // 2  # the first half shows how the training began
        while (num_needed := sum(map(len, self._recovery())) + ROOM_BYTES) > most and len(self._unwritten_events) > 1:
            self._unwritten_events.pop(-2)  # the last one is the end of the run
        num_bytes = 0
        while self._last_writes and num_bytes < num_needed and num_bytes + self._last_writes[-1][0] <= most:
            length, num_records, last = self._last_writes.pop()
            num_bytes += length
            self._count_dropped(num_records, _step_of(last), self._gap.reason if self._gap else "")
        if num_bytes:
            self._truncate(num_bytes)

    def _truncate(self, num_bytes: int) -> None:
        os.ftruncate(self._fd, os.fstat(self._fd).st_size - num_bytes)

    def _count_dropped(self, num: int, step: int, reason: str) -> None:
        with self._lock:
            self._num_dropped += num
            step, reason = (step if 0 <= step < 1 << 63 else -1), f.capped(reason)
            before = self._gap or Gap(0, step, step, reason)
            steps = [known for known in (before.first_step, before.last_step, step) if known >= 0] or [-1]
            self._gap = Gap(before.num_dropped + num, min(steps), max(steps), before.reason)
            if self._warned:
                return
            self._warned = True
        _quietly(
            _log.warning,
            "Sonde cannot write to %s (%s). The training continues; dropped records are counted, and writing is tried again.",
            self.path,
            reason,
        )

    def _check_descriptor(self) -> None:
        """Raises where the file is gone. A file that the script has closed is opened again."""
        self._num_flushes += 1
        try:
            status = os.fstat(self._fd)
            is_ours = (status.st_dev, status.st_ino) == self._identity
        except OSError:
            is_ours = False
        if not is_ours:
            self._fd = -1  # whatever has the number now
            self._reopen()
        elif status.st_nlink == 0 and self._num_flushes % UNLINKED_CHECK == 0:
            # Bytes written to a deleted file would fill the disk and could not be read.
            fd, self._fd = self._fd, -1
            os.close(fd)
            raise FileNotFoundError("the run directory was deleted")

    def _reopen(self) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        if file_identity(fd) != self._identity:
            os.close(fd)
            raise FileNotFoundError("the log was replaced by another file")
        self._fd = move_apart(fd)

    # ---- segments

    def _start_segment(self) -> None:
        """Continue in a new file that can be read alone. If that fails, the old file grows."""
        self._size -= self._segment_bytes // 8  # tried again after an eighth of a segment
        start = f.header() + f.manifest_record(self._manifest | {"segment": self._segment + 1})
        start += b"".join(f.sites_records(self._sites))
        try:
            fd, path = self._create(self._segment + 1)
        except OSError:
            return
        try:
            if _write(fd, start) == len(start):
                self._identity = file_identity(fd)
                self._fd, fd = fd, self._fd
                self.path, path = path, self.path
                self._last_writes.clear()
                self._segment += 1
                self._size = len(start)
                self._sites_missing = False
            else:
                _quietly(os.unlink, path)
        except OSError:
            _quietly(os.unlink, path)
        finally:
            _quietly(os.close, fd)

    def _create(self, segment: int) -> tuple[int, Path]:
        path = self._directory / f"{self._stem}-{segment:03d}.sonde"
        return move_apart(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)), path


def _num_earlier_processes(directory: Path, rank: int) -> int:
    """The number of processes of this rank that wrote here before; a count, because clocks may be wrong."""
    with os.scandir(directory) as entries:
        return sum(entry.name.startswith(f"rank{rank}-") and entry.name.endswith("-000.sonde") for entry in entries)


def _encode_event(event: TypedEvent, step: int) -> bytes:
    kind, data = encode(event)
    return f.event_record(kind, step, time.time_ns(), data)


def _step_of(record: bytes) -> int:
    try:
        payload = record[f.RECORD_BYTES :]
        if record[4] == f.FRAME:
            return f.frame_head(payload)[0]
        return f.event(payload)[0].step if record[4] == f.EVENT else -1
    except Exception:
        return -1


def _quietly(call: Any, *arguments: Any) -> None:
    try:
        call(*arguments)
    except Exception:
        pass

"""Writer: appends one process's facts to its own file, and never gets in the way of the training.

Records are collected during a step and leave with one `os.write` when it ends: what a write has taken over survives the
death of the process. After opening nothing here raises. Whatever cannot be written is counted, and a gap record says so
as soon as writing works again.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonde.errors import SondeError
from sonde.events import encode
from sonde.runlog import format as f
from sonde.runlog.format import FramePlan, Gap
from sonde.runlog.writer_process import identity

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from sonde.events import Site, TypedEvent

SEGMENT_BYTES = 128 << 20  # then a new file: finished segments can be copied away while the training goes on
PENDING_BYTES = 8 << 20  # flushed in between when a step collects more, so that memory stays bounded
UNLINKED_CHECK = 256  # flushes between two looks whether the file still has a name
EXACT_KINDS = frozenset({"step", "batch"})  # losses and hashes keep all their bits

_write = os.write  # the one seam for writing: fault injection replaces it
_log = logging.getLogger("sonde")


class Writer:
    """One process's file in a run directory. In a forked child every method does nothing."""

    __slots__ = ("__dict__", "__weakref__", "_fd", "_gap", "_lock", "_num_flushes", "_pending", "_pid", "_segment_bytes", "_size")

    def __init__(
        self,
        directory: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        manifest: Mapping[str, Any] | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        lock: Any = None,
    ) -> None:
        """`lock`: a reentrant one that is free; the native kernel has its own kind, which it need not call."""
        self._directory = Path(directory)
        self._pid = os.getpid()
        self._lock = lock or threading.RLock()  # reentrant: a signal handler may log while a flush is under way
        self._pending: list[bytes] = []  # whole records
        self._num_pending_bytes = 0
        self._sites: list[Site] = []
        self._sites_missing = False  # some never reached the disk: all are written again
        self._gap: Gap | None = None
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
                "attempt": _earlier_processes(self._directory, rank),
                **identity(),
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
            raise SondeError(
                f"The run cannot be written to {self._directory}: {error.strerror or error}. "
                "Name another place with to=… or output_dir=…, or make this one writable."
            ) from error
        self._size = len(start)  # only decides when to roll

    @property
    def num_dropped(self) -> int:
        """Records that could not be written, so far."""
        return self._num_dropped

    @property
    def unsaid(self) -> Gap | None:
        """What was dropped and is not even mentioned in the run, since nothing could be written after it."""
        return self._gap

    # ---- collecting

    def plan(self, kind: str, fields: Sequence[str], site_ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> FramePlan:
        """What `frame` needs; made once, used for every step that measures the same sites."""
        try:
            return FramePlan(kind, fields, site_ids, exact=kind in EXACT_KINDS)
        except Exception as error:
            self._lose(0, -1, f"the {f.capped(kind)} frame cannot be written: {error}")
            return FramePlan("", (), (), exact=True)  # fits no rows, so what is measured for it is counted as dropped

    def frame(self, plan: FramePlan, step: int, rows: npt.NDArray[np.float64], time_ns: int = 0) -> None:
        """One row per site, one column per field."""
        if os.getpid() != self._pid:
            return
        try:
            self.put(plan.encode(step, time_ns, rows))
        except Exception as error:
            self._lose(1, step, str(error))

    def column(self, plan: FramePlan, step: int, values: Sequence[float], time_ns: int = 0, *, flush: bool = False) -> None:
        """A frame with one field, one number per site; with `flush`, it and all before it are written at once."""
        if os.getpid() != self._pid:
            return
        try:
            self.put(plan.encode_column(step, time_ns, values), flush=flush)
        except Exception as error:
            self._lose(1, step, str(error))

    def put(self, record: bytes, *, flush: bool = False) -> None:
        """A record that is encoded already; with `flush`, it and all before it are written at once."""
        if os.getpid() == self._pid:
            with self._lock:
                self._pending.append(record)
                self._num_pending_bytes += len(record)
                if flush or self._num_pending_bytes > PENDING_BYTES:
                    self._flush()

    def sites(self, sites: Sequence[Site]) -> None:
        """New sites: before the first frame that measures them."""
        if os.getpid() != self._pid or not sites:
            return
        try:
            self._sites.extend(sites)
            for record in f.sites_records(sites):
                self.put(record)
        except Exception as error:
            self._lose(1, -1, str(error))

    def emit(self, event: TypedEvent, step: int) -> None:
        """Records a typed event."""
        if os.getpid() != self._pid:
            return
        try:
            kind, data = encode(event)
            self.put(f.event_record(kind, step, time.time_ns(), data))
        except Exception as error:
            self._lose(1, step, str(error))

    def event(self, kind: str, step: int, data: Mapping[str, Any]) -> None:
        """Records an event by its kind and data; `emit` is the same for a typed event."""
        if os.getpid() != self._pid:
            return
        try:
            self.put(f.event_record(kind, step, time.time_ns(), data))
        except Exception as error:
            self._lose(1, step, str(error))

    # ---- writing

    def flush(self) -> None:
        """Write everything since the last flush: once per step."""
        if os.getpid() == self._pid and self._pending:
            with self._lock:
                self._flush()

    def wait(self, seconds: float) -> bool:
        """Before the end: can it still be written? Where another thread hangs in a write for so long, nothing is written any more,
        so that whoever leaves need not wait for a disk that does not answer."""
        if self._lock.acquire(timeout=seconds):
            self._lock.release()
            return True
        self._pid = -1
        return False

    def close(self) -> None:
        """Flush and let go of the file. Later calls do nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._pending or self._gap:
                self._flush()
            fd, self._fd, self._pid = self._fd, -1, -1
        if fd >= 0:
            _quietly(os.close, fd)

    def _flush(self) -> None:
        records, self._pending, self._num_pending_bytes = self._pending, [], 0
        if not records and self._gap is None:
            return
        num_repeated = num_written = 0
        reason = ""
        try:
            self._num_flushes += 1
            if self._size > self._segment_bytes:
                self._roll()
            if self._num_flushes % UNLINKED_CHECK == 0 and self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:
                self._give_up_file()
            if self._gap is not None:
                front = self._front(self._gap)
                num_repeated, records = len(front), front + records
            chunk = b"".join(records)
            num_written = _write(self._fd, chunk)
            while 0 < num_written < len(chunk):  # disk full, usually: the next call then says why
                num_more = _write(self._fd, chunk[num_written:])
                if num_more <= 0:
                    break
                num_written += num_more
            self._size += num_written
            if num_written == len(chunk):
                if num_repeated:
                    self._gap, self._sites_missing = None, False
                return
            reason = "short write"
        except Exception as error:
            reason = str(error) or type(error).__name__
        except BaseException:  # Ctrl-C: whether the write came first cannot be known, so it counts as lost
            self._settle(records, num_repeated, 0, "interrupted")
            raise
        self._settle(records, num_repeated, num_written, reason)

    def _front(self, gap: Gap) -> list[bytes]:
        """What comes first once writing works again."""
        front = [f.gap_record(gap)]
        return front + f.sites_records(self._sites) if self._sites_missing else front

    def _settle(self, records: list[bytes], num_repeated: int, num_written: int, reason: str) -> None:
        """After a write that failed: cut off the torn record, count what was lost."""
        end = 0
        for index, record in enumerate(records):
            if end + len(record) > num_written:
                break
            end += len(record)
            if index == 0 and num_repeated:
                self._gap = None  # the gap record itself got through
            if index + 1 == num_repeated:
                self._sites_missing = False
        else:
            return
        if num_written > end:
            # Whole records stay, so no reader ever sees a record vanish. Where cutting is impossible, readers resync.
            _quietly(self._cut, num_written - end)
        lost_repeated = max(0, num_repeated - index)  # not lost records: they stay due
        for record in records[index + lost_repeated :]:
            self._lose(1, _step_of(record), reason)
            self._sites_missing |= record[4] == f.SITES
        if lost_repeated and self._gap is None:  # the gap was written, the repeated sites were not
            self._lose(1, -1, reason)

    def _cut(self, num_bytes: int) -> None:
        os.ftruncate(self._fd, os.fstat(self._fd).st_size - num_bytes)

    def _lose(self, num: int, step: int, reason: str) -> None:
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
            "Sonde cannot write to %s (%s). The training goes on; what is lost is counted, and writing is tried again.",
            self.path,
            reason,
        )

    def _give_up_file(self) -> None:
        """The file was deleted: bytes that nobody can ever read would only fill the disk."""
        fd, self._fd = self._fd, -1
        os.close(fd)
        raise FileNotFoundError("the run directory was deleted")

    # ---- segments

    def _roll(self) -> None:
        """Go on in a new file that can be read alone. Where that fails the old one simply grows on."""
        self._size -= self._segment_bytes // 8  # when to try again
        start = f.header() + f.manifest_record(self._manifest | {"segment": self._segment + 1})
        start += b"".join(f.sites_records(self._sites))
        try:
            fd, path = self._create(self._segment + 1)
        except OSError:
            return
        try:
            if _write(fd, start) == len(start):
                self._fd, fd = fd, self._fd
                self.path, path = path, self.path
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
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), path


def _earlier_processes(directory: Path, rank: int) -> int:
    """A count and not a clock says which attempt this is."""
    with os.scandir(directory) as entries:
        return sum(entry.name.startswith(f"rank{rank}-") and entry.name.endswith("-000.sonde") for entry in entries)


def _step_of(record: bytes) -> int:
    try:
        payload = record[f.RECORD_BYTES :]
        if record[4] == f.FRAME:
            return f.clock(payload)[0]
        return f.event(payload)[0].step if record[4] == f.EVENT else -1
    except Exception:
        return -1


def _quietly(call: Any, *arguments: Any) -> None:
    try:
        call(*arguments)
    except Exception:
        pass

"""The file that names the signal a training died of: Python's faulthandler writes it, the reader parses it.

SIGILL, SIGSEGV, SIGBUS, SIGFPE and SIGABRT end a process inside of native code: no Python code of ours runs any more, so no `end` event is
written. faulthandler writes the signal and the Python stack of every thread to an open file first. The file lies beside the log of the
process, has the process_identity of the process in its name, and is removed when the script ends in another way.
"""

import contextlib
import faulthandler
import os
import re
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sonde.events import Event, FatalSignalReceived, encode
from sonde.runlog.is_writer_running import process_identity
from sonde.runlog.own_descriptor import close_own, file_identity, move_apart
from sonde.runlog.run_directory import read_regular_file

FILE_PREFIX = "fatal-signal"
MAX_DUMP = 1 << 18  # bytes that are read: faulthandler writes at most 100 frames of 100 threads, most of them short
# What faulthandler calls a signal (Python 3.12 and newer write "Floating-point"), and how it is named here.
SIGNALS = {
    "Illegal instruction": ("SIGILL", "illegal instruction"),
    "Segmentation fault": ("SIGSEGV", "segmentation fault"),
    "Bus error": ("SIGBUS", "bus error"),
    "Floating point exception": ("SIGFPE", "arithmetic error"),
    "Aborted": ("SIGABRT", "abort"),
}

_HEAD = re.compile(r"Fatal Python error: ([^\n]{1,80})\n")
_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-fA-F]+[^\n]*\(most recent call first\):")
_FRAME = re.compile(r'  File "([^\n]{1,1000})", line ([0-9]{1,9}) in ([^\n]{1,500})')
_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]|^<frozen ")
_PACKAGES = re.compile(r".*[/\\](site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]")
_SEPARATOR = re.compile(r"[/\\]")
_OWN = str(Path(__file__).resolve().parents[1]) + os.sep


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One row of the dump."""

    path: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """`train.py:41`, as the events of a run name lines."""
        return f"{_SEPARATOR.split(self.path)[-1]}:{self.line}"


@dataclass(frozen=True, slots=True)
class FatalSignal:
    """The signal that ended a process, and where it was."""

    signal: str  # "SIGILL"
    meaning: str  # "illegal instruction"
    innermost: StackFrame | None = None  # the last Python frame before native code
    user: StackFrame | None = None  # the nearest one that is in no library

    def to_event(self, step: int) -> Event:
        """The event that the process could not write any more."""
        library = self.innermost if self.innermost != self.user else None
        kind, data = encode(
            FatalSignalReceived(
                signal=self.signal,
                meaning=self.meaning,
                source=self.user.place if self.user else "",
                function=self.user.function if self.user else "",
                inside=_short(library.path) if library else "",
                inside_line=library.line if library else 0,
                inside_function=library.function if library else "",
            )
        )
        return Event(kind, step, data)


def dump_path(directory: Path, manifest: Mapping[str, Any]) -> Path:
    """Where the process of a manifest writes. The manifest may come from a file that somebody else made: only plain characters are used."""
    parts = (str(manifest.get(key, "")) for key in ("host", "pid", "start_ticks"))
    return Path(directory) / "-".join([FILE_PREFIX, *(re.sub(r"[^A-Za-z0-9]+", "_", part)[:40] for part in parts)])


# ---- the training process


class _DumpFile:
    """What faulthandler is given: it keeps the object alive exactly as long as it writes to it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def flush(self) -> None:
        pass


_active: weakref.ref[_DumpFile] | None = None
_forks_watched = False


@contextlib.contextmanager
def fatal_signals_recorded(directory: Path) -> Iterator[None]:
    """Lets faulthandler write fatal signals to a file in the run's directory, where nobody uses faulthandler already.

    Forked children (the workers of a DataLoader) are left out: their death is not that of the training.
    """
    global _active, _forks_watched
    if faulthandler.is_enabled():  # by PYTHONFAULTHANDLER, -X dev, or whoever runs us: theirs stays
        yield
        return
    path = dump_path(directory, process_identity())
    try:
        fd = move_apart(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666))
    except OSError:
        yield  # a directory that is gone or full: the training goes on without
        return
    if not _forks_watched:
        os.register_at_fork(after_in_child=_leave)
        _forks_watched = True
    identity, process = file_identity(fd), os.getpid()
    file = _DumpFile(fd)
    faulthandler.enable(file, all_threads=True)
    _active = weakref.ref(file)
    del file
    try:
        yield
    finally:
        _leave()
        close_own(fd, identity)
        with contextlib.suppress(OSError):
            if os.getpid() == process and not path.stat().st_size:  # a child that reaches the end of the script leaves it to its parent
                path.unlink()


def _leave() -> None:
    """Disables faulthandler where it still writes to our file. The script may have enabled it for a file of its own, or disabled it."""
    global _active
    ours, _active = _active, None
    if ours is not None and ours() is not None:
        faulthandler.disable()


# ---- the reading process


def read_fatal_signal(path: Path) -> FatalSignal | None:
    """The signal in a dump; None if there is no dump or it is not valid. Never raises: the file may be damaged."""
    try:
        text = read_regular_file(path, MAX_DUMP).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None
    head = _HEAD.search(text)
    named = SIGNALS.get(head[1].strip().replace("-", " ")) if head is not None else None
    if head is None or named is None:
        return None
    frames = _frames(text[head.end() :])
    runners = (frame.path for frame in frames if _SEPARATOR.sub("/", frame.path).endswith("/sonde/script_runner.py"))
    own = (_OWN, *(path.removesuffix("script_runner.py") for path in runners))  # where Sonde was installed there, too
    user = next((frame for frame in frames if not _LIBRARY.search(frame.path) and not frame.path.startswith(own)), None)
    return FatalSignal(*named, frames[0] if frames else None, user)


def _frames(text: str) -> list[StackFrame]:
    """The stack of the thread that got the signal. A thread without Python code of its own (one of OpenMP's) has none: then that of the
    main thread, which faulthandler writes last and which waits for the others."""
    starts = list(_THREAD.finditer(text))
    if not starts:
        return []
    chosen = next((start for start in starts if start[1] == "Current thread"), starts[-1])
    frames = []
    for row in text[chosen.end() :].splitlines()[1:]:
        match = _FRAME.fullmatch(row)
        if match is None:
            break
        frames.append(StackFrame(match[1], int(match[2]), match[3]))
    return frames


def _short(path: str) -> str:
    """`torch/nn/modules/linear.py`: from the package on, or else the last folders."""
    return _PACKAGES.sub("", path) if _PACKAGES.match(path) else "/".join(_SEPARATOR.split(path)[-3:])

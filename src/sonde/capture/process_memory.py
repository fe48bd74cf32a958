"""The memory of this process as the operating system and malloc count it. Functions return None if a value is not available."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Heap(NamedTuple):
    """Bytes that malloc has allocated, and bytes that it holds from the operating system."""

    used: int
    held: int


class Limit(NamedTuple):
    """The maximum memory of this process, and the origin of that limit."""

    num_bytes: int
    by: str


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def _find_mallinfo() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None).mallinfo2  # glibc from 2.33 on; musl, macOS and Windows have none
    except (OSError, AttributeError, TypeError):
        return None
    function.restype, function.argtypes = _Mallinfo2, []
    return function


_mallinfo = _find_mallinfo()


def heap() -> Heap | None:
    """The heap of malloc. None also with another allocator, because glibc then counts almost nothing."""
    if _mallinfo is None:
        return None
    info = _mallinfo()
    used, held = info.uordblks + info.hblkhd, info.arena + info.hblkhd
    return Heap(used, held) if held else None


def rss() -> int | None:
    """Bytes of this process in physical memory."""
    return _statm()[1]


def peak_rss() -> int | None:
    """The peak of `rss` since the start of the process."""
    try:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    except (ImportError, OSError):
        return None


def _statm() -> tuple[int, int] | tuple[None, None]:
    """Bytes of address space, used or not, and of physical memory."""
    try:
        fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None, None
    try:
        size, resident, *_ = os.read(fd, 128).split()
        return int(size) * _PAGE, int(resident) * _PAGE
    except (OSError, ValueError):
        return None, None
    finally:
        os.close(fd)


def limit() -> Limit | None:
    """The smallest of the machine's memory, the container's limit and the rest of ulimit -v."""
    return min(filter(None, (_machine(), _container(), _ulimit())), default=None)


def available() -> int | None:
    """Bytes that this process may still allocate without swapping: the smallest of what the machine and the container have left."""
    return min((each for each in (_available_of_machine(), _available_of_container()) if each is not None), default=None)


def _available_of_machine() -> int | None:
    try:
        return _read_field(Path("/proc/meminfo"), "MemAvailable:") * 1024 or None
    except (OSError, ValueError):
        return None


def _available_of_container() -> int | None:
    for path, num_bytes in _cgroup_limits():
        used = path.with_name("memory.current" if path.name == "memory.max" else "memory.usage_in_bytes")
        try:
            # The kernel drops inactive files when it needs the memory.
            dropped = _read_field(path.with_name("memory.stat"), "inactive_file", "total_inactive_file")
            return max(0, num_bytes - int(used.read_text()) + dropped)
        except (OSError, ValueError):
            continue
    return None


def _read_field(file: Path, *names: str) -> int:
    """The number after one of these names in a file of the kernel."""
    rows = (line.split() for line in file.read_text().splitlines())
    return next((int(row[1]) for row in rows if row and row[0] in names), 0)


def _machine() -> Limit | None:
    try:
        return Limit(os.sysconf("SC_PHYS_PAGES") * _PAGE, "this machine")
    except (AttributeError, ValueError, OSError):
        return None


def _container() -> Limit | None:
    return next((Limit(num_bytes, "the container") for _, num_bytes in _cgroup_limits()), None)


def _cgroup_limits() -> Iterator[tuple[Path, int]]:
    """Files of the control group, version 2 or 1, that hold a limit; "max" means none."""
    files = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.insert(0, Path(f"/sys/fs/cgroup{path}/memory.max"))
            elif "memory" in controllers.split(","):
                files.append(Path(f"/sys/fs/cgroup/memory{path}/memory.limit_in_bytes"))
    except (OSError, ValueError):
        pass
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            if (num_bytes := int(file.read_text())) < 1 << 60:
                yield file, num_bytes


def _ulimit() -> Limit | None:
    """ulimit -v limits addresses, not memory. Unused addresses are subtracted: torch alone reserves several GiB of them."""
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError, ValueError):
        return None
    if soft == resource.RLIM_INFINITY:
        return None
    size, resident = _statm()
    unused = max(0, (size or 0) - (resident or 0))
    return Limit(max(0, soft - unused), "ulimit -v")

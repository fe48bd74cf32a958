"""File descriptors that Sonde holds open during a training.

A script may close descriptors that it did not open (`os.closerange(3, 256)`, as programs do that become daemons), and the next file that it
opens gets the number of one of them. So Sonde's have high numbers, which no other file gets by chance, and `file_identity` tells whether
one still belongs to its file.
"""

import contextlib
import os

NUM_HIGHEST = 64  # descriptors below the limit of the process, of which Sonde's is the first that is free


def move_apart(fd: int) -> int:
    """The same open file under a high number, with the old one closed; the old one where there is no room."""
    import fcntl  # not on Windows, where runs can be read
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    lowest = min(limit if limit > 0 else 1024, 1024) - NUM_HIGHEST  # select() takes no number above 1024
    if fd >= lowest:
        return fd
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    except (OSError, ValueError):
        return fd
    os.close(fd)
    return moved


def file_identity(fd: int) -> tuple[int, int]:
    """Device and inode of the file behind a descriptor; no file has (-1, -1), which is the answer for a closed one."""
    try:
        status = os.fstat(fd)
    except OSError:
        return -1, -1
    return status.st_dev, status.st_ino


def close_own(fd: int, identity: tuple[int, int]) -> None:
    """Close a descriptor, unless it has become that of another file."""
    if file_identity(fd) == identity:
        with contextlib.suppress(OSError):
            os.close(fd)

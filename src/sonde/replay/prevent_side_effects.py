"""Isolates a forked child, so that nothing it does reaches the training or the outside world.

A child has a copy of everything, but shares three things with its parent: mapped memory that is shared, open files, and the world outside
of the process. `isolate` replaces the first by copies, the second by the null device or by files opened anew for reading, and closes the
third by a filter of system calls. It never returns to the state before: the child ends with `os._exit`.
"""

import contextlib
import ctypes
import errno
import faulthandler
import fcntl
import gc
import io
import logging
import os
import platform
import re
import resource
import signal
import stat
import struct
import sys
import threading
from collections.abc import Collection
from math import ceil
from typing import Any

import torch

from sonde.capture import process_memory
from sonde.capture.monkeypatch import override
from sonde.errors import CannotReplay

SPARE_BYTES = 256 << 20  # of memory that must be left after shared memory was copied

_WRITABLE_SHARED_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .w.s \S+ \S+ \d+ *(.*)$", re.MULTILINE)
_READ_WRITE, _PRIVATE_ANONYMOUS, _MOVE_TO_ADDRESS = 3, 0x22, 3  # of mmap and mremap
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_MEMORY_DEVICES = 1  # the major number of /dev/null, /dev/zero and /dev/urandom


def isolate(keep: Collection[int], limit_s: float) -> None:
    """Isolate this process, a child that was just forked, for good.

    Args:
        keep: file descriptors that stay open for writing.
        limit_s: seconds after which the kernel ends the child.

    Raises `CannotReplay` where shared memory cannot be copied.
    """
    gc.disable()  # the parent's garbage has finalizers: a DataLoader's iterator would stop the workers
    sys.dont_write_bytecode = True
    faulthandler.disable()  # it writes to a file of the run
    _reset_signals(limit_s)
    _lower_priority()
    _copy_shared_memory()
    _replace_descriptors(keep)
    _silence_streams()
    torch.set_num_threads(1)  # the threads of OpenMP are not copied by fork: a parallel region would wait for them for ever
    override(torch, "set_num_threads", lambda original: lambda num: None)
    override(threading.Condition, "wait", _refuse_to_wait)
    sys.addaudithook(_refuse_side_effects)
    _forbid_system_calls()


def _reset_signals(limit_s: float) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # some are reserved by the C library
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides what becomes of the child
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.alarm(ceil(limit_s))


def _lower_priority() -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        os.nice(10)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, this process ends and not the training


# ---- memory


def _copy_shared_memory() -> None:
    """Replace every writable shared mapping, at its address, by a private copy: tensors of DataLoader workers and of `share_memory()`,
    memory-mapped files, locks and queues of multiprocessing."""
    mappings = _shared_mappings()
    size = sum(end - start for start, end in mappings)
    available = process_memory.available()
    if available is not None and size + SPARE_BYTES > available:
        raise CannotReplay(f"{size / 2**30:.1f} GB of shared memory would have to be copied, and {available / 2**30:.1f} GB are free")
    if not mappings:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    for start, end in mappings:
        length = end - start
        copy = libc.mmap(None, length, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
        if copy in (None, ctypes.c_void_p(-1).value):
            raise CannotReplay("there is too little memory for a copy of shared memory")
        ctypes.memmove(copy, start, length)
        if libc.mremap(copy, length, length, _MOVE_TO_ADDRESS, start) != start:
            raise CannotReplay(f"shared memory could not be copied ({os.strerror(ctypes.get_errno())})")


def _shared_mappings() -> list[tuple[int, int]]:
    """Start and end of the writable shared mappings of this process; those of devices are left as they are."""
    try:
        with open("/proc/self/maps") as file:
            found = _WRITABLE_SHARED_MAPPING.findall(file.read())
    except OSError:
        return []
    is_memory = re.compile(r"(?!/dev/)|/dev/shm|/dev/zero").match
    return [(int(start, 16), int(end, 16)) for start, end, path in found if is_memory(path)]


# ---- open files


def _replace_descriptors(keep: Collection[int]) -> None:
    """Files that are open for reading are opened anew, since their position is shared with the parent. Everything else that can be written
    to, pipes, sockets and terminals become the null device."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir(folder)):
        if number in keep or number == null:
            continue
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            status = os.fstat(number)
            if stat.S_ISDIR(status.st_mode) or (stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == _MEMORY_DEVICES):
                continue
            is_read_only = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if not (stat.S_ISREG(status.st_mode) and is_read_only and _open_again(f"{folder}/{number}", number)):
                os.dup2(null, number)
    os.close(null)


def _open_again(path: str, number: int) -> bool:
    try:
        copy = os.open(path, os.O_RDONLY)
    except OSError:
        return False  # another user's file, or no /proc
    os.lseek(copy, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(copy, number)
    os.close(copy)
    return True


def _refuse_to_wait(original: Any) -> Any:
    """`queue.get()` and `event.wait()` wait for other threads, which fork does not copy: they would wait for ever."""

    def wait(self: threading.Condition, timeout: float | None = None) -> bool:
        if timeout is None and threading.active_count() == 1:
            raise CannotReplay("it waits for another thread, which the copy of the process does not have")
        return bool(original(self, timeout))

    return wait


def _silence_streams() -> None:
    """Nothing is printed or logged by the child. A notebook's stream would open a connection of its own."""
    sys.stdout = sys.__stdout__ = io.StringIO()  # type: ignore[misc,assignment]
    sys.stderr = sys.__stderr__ = io.StringIO()  # type: ignore[misc,assignment]
    logging.disable(logging.CRITICAL)
    stream = getattr(sys.modules.get("ipykernel.iostream"), "OutStream", None)
    if stream is not None:
        stream.write = lambda self, text: len(text)
        stream.flush = lambda self: None


# ---- the world outside

_REFUSED_EVENTS = {
    "os.remove": "it deletes a file", "os.rename": "it renames a file", "os.rmdir": "it deletes a directory",
    "os.mkdir": "it creates a directory", "os.truncate": "it truncates a file", "os.chmod": "it changes the rights of a file",
    "os.link": "it creates a link", "os.symlink": "it creates a link", "os.kill": "it sends a signal",
    "os.system": "it starts a program", "os.exec": "it starts a program", "os.posix_spawn": "it starts a program",
    "subprocess.Popen": "it starts a program", "os.fork": "it forks", "os.forkpty": "it forks", "shutil.rmtree": "it deletes a directory",
    "socket.connect": "it connects to another program", "socket.bind": "it opens a port", "socket.sendto": "it sends to another program",
    "sqlite3.connect": "it opens a database",
}  # fmt: skip


def _refuse_side_effects(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook: says in words what the filter of system calls refuses."""
    if event == "open":
        path, _, flags = args
        if isinstance(flags, int) and flags & _WRITING and path != os.devnull:
            raise CannotReplay(f"it opens {str(path)[:200]} for writing")
    elif event in _REFUSED_EVENTS:
        raise CannotReplay(_REFUSED_EVENTS[event])


_CUT_OFF = (errno.EPERM, errno.EACCES, errno.ENOTSOCK)  # errors of the filter, of Landlock, and of sockets that are now the null device


def describe_failure(error: BaseException) -> str:
    """Why code failed when it ran again in an isolated process."""
    if isinstance(error, CannotReplay):
        return str(error)
    try:
        name = f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # its __str__ is the user's code, too
        name = type(error).__name__
    if isinstance(error, EOFError) or (isinstance(error, OSError) and error.errno in _CUT_OFF):
        return f"it talks to another process or writes a file, which a copy of it must not do ({name})"[:500]
    return f"running it again failed ({name})"[:500]


# Numbers of system calls that act on the world outside, of x86-64.
_REFUSED_CALLS = {
    "shmget": 29, "shmat": 30, "shmctl": 31, "connect": 42, "sendto": 44, "sendmsg": 46, "bind": 49, "fork": 57, "vfork": 58,
    "execve": 59, "kill": 62, "semget": 64, "semop": 65, "semctl": 66, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71,
    "truncate": 76, "ftruncate": 77, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88,
    "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "ptrace": 101, "rt_sigqueueinfo": 129, "utime": 132, "mknod": 133,
    "setpriority": 141, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
    "tkill": 200, "semtimedop": 220, "tgkill": 234, "utimes": 235, "mq_open": 240, "mq_unlink": 241, "mkdirat": 258, "mknodat": 259,
    "fchownat": 260, "futimesat": 261, "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266, "fchmodat": 268,
    "utimensat": 280, "fallocate": 285, "rt_tgsigqueueinfo": 297, "sendmmsg": 307, "process_vm_writev": 311, "renameat2": 316,
    "execveat": 322, "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_getfd": 438, "fchmodat2": 452,
}  # fmt: skip
_OPENAT, _OPEN, _OPENAT2, _CLONE, _CLONE3 = 257, 2, 437, 56, 435
_CLONE_THREAD = 0x10000
_X86_64 = 0xC000003E  # AUDIT_ARCH_X86_64
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl
_ALLOW, _ERROR = 0x7FFF0000, 0x50000


def _forbid_system_calls() -> None:
    """Refuse what acts on the world outside, in C++ as in Python, by seccomp; by Landlock where that is not to be had."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if platform.machine() == "x86_64":
        code = ctypes.create_string_buffer(_seccomp_program())
        header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code.raw) // 8, ctypes.addressof(code)))
        if libc.prctl(_SET_SECCOMP, _FILTER, ctypes.c_void_p(ctypes.addressof(header)), 0, 0) == 0:
            return
    _forbid_writing_files(libc)


def _seccomp_program() -> bytes:
    load, is_equal, has_bits, answer = 0x20, 0x15, 0x45, 0x06
    refuse, unknown = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS  # for an unknown call the C library tries an older one

    def do(code: int, value: int, skip_if_true: int = 0, skip_if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, skip_if_true, skip_if_false, value)

    first_argument, second_argument, third_argument = 16, 24, 32  # offsets in struct seccomp_data
    program = [do(load, 4), do(is_equal, _X86_64, 1, 0), do(answer, _ALLOW), do(load, 0)]
    for number, flags_at in ((_OPENAT, third_argument), (_OPEN, second_argument)):
        program += [do(is_equal, number, 0, 4), do(load, flags_at), do(has_bits, _WRITING, 0, 1), do(answer, refuse), do(answer, _ALLOW)]
    program += [do(is_equal, _CLONE, 0, 4), do(load, first_argument), do(has_bits, _CLONE_THREAD, 1, 0), do(answer, refuse)]
    program += [do(answer, _ALLOW)]
    for number in (_OPENAT2, _CLONE3):
        program += [do(is_equal, number, 0, 1), do(answer, unknown)]
    for number in _REFUSED_CALLS.values():
        program += [do(is_equal, number, 0, 1), do(answer, refuse)]
    return b"".join([*program, do(answer, _ALLOW)])


_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_LANDLOCK_WRITING = 0b1_1111_1111_0010  # write, remove and make files of every kind; of the first version of Landlock


def _forbid_writing_files(libc: Any) -> None:
    """Landlock: no file can be written, created or removed. A kernel without it leaves the audit hook alone."""
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(ctypes.c_uint64(_LANDLOCK_WRITING)), 8, 0)
    if ruleset >= 0:
        libc.syscall(_RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)

"""Runs a function in a forked, isolated copy of this process. The training process runs no code of the user a second time.

The child has everything that the step had, by copy on write. Its answer is JSON that comes back through a pipe; an answer has a length in
front, so that it is complete also while another process holds a copy of the pipe. A child that hangs at once, because another thread held a
lock of malloc at the fork, is replaced by another one; a child that hangs later is ended by its own alarm or by the parent.
"""

import contextlib
import ctypes
import json
import operator
import os
import random
import select
import signal
import struct
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch

from sonde.capture import process_memory, training_callbacks
from sonde.errors import CannotReplay
from sonde.replay.prevent_side_effects import SPARE_BYTES, describe_failure, isolate
from sonde.runlog.own_descriptor import move_apart

LIMIT_S = 30.0  # seconds that a child may take
MAX_ANSWER = 64 << 20  # bytes
MAX_FORKS = 4  # a child hangs at once if another thread held a lock of malloc at the fork
START_S = 0.15  # seconds that a child has to start: alone it takes 1 ms, at most 15. Each replacement adds this to the training's wait

_LENGTH = struct.Struct("<Q")

Work = Callable[[Callable[[Mapping[str, Any]], None]], Mapping[str, Any]]
"""`work(preliminary)` runs in the child and returns its answer. It may call `preliminary` with an answer that holds if it fails later."""


@dataclass(frozen=True, slots=True)
class ChildAnswer:
    """What a child found. With a `failure`, `data` is its preliminary answer, if it gave one."""

    data: Mapping[str, Any] | None
    failure: str = ""


class ReplayChild:
    """A forked child that runs `work`. Ask for its answer with `poll`."""

    def __init__(self, work: Work, *, keep: Collection[int] = (), limit_s: float = LIMIT_S) -> None:
        """Fork. `keep`: descriptors that the child may write to. Raises `CannotReplay` where there is no child."""
        self._limit_s = limit_s
        self._start(work, keep)
        for _ in range(MAX_FORKS - 1):
            if _wait_readable(self._watched, START_S):
                break
            self.kill()
            self._start(work, keep)

    def _start(self, work: Work, keep: Collection[int]) -> None:
        self._reader, writer = os.pipe()
        self._received = bytearray()
        self._data: Mapping[str, Any] | None = None
        self._deadline = monotonic() + self._limit_s
        random_state = random.getstate()
        try:
            self._pid = _fork()
        except OSError as error:
            os.close(self._reader)
            os.close(writer)
            raise CannotReplay(f"no process could be started for it ({error.strerror})") from error
        if self._pid == 0:
            training_callbacks.remove_stand_ins()
            random.setstate(random_state)  # Python seeds its generator anew after a fork
            _run_and_exit(work, writer, keep, self._limit_s)
        os.close(writer)
        self._reader = move_apart(self._reader)
        os.set_blocking(self._reader, False)
        self._pidfd = _open_pidfd(self._pid)
        self._watched = [self._reader] if self._pidfd is None else [self._reader, self._pidfd]

    def poll(self, timeout_s: float = 0.0) -> ChildAnswer | None:
        """The answer; None if there is none yet after `timeout_s`."""
        until = min(monotonic() + timeout_s, self._deadline)
        while True:
            has_ended = self._receive(max(0.0, until - monotonic()))
            answer = self._decode()
            if answer is not None:
                self._end()
                return answer
            if has_ended:
                how = _describe(self._end())
                ended = f"the process that ran it again ended ({how})"
                return ChildAnswer(self._data, self._too_long if how == "killed by SIGALRM" else ended)
            if monotonic() >= self._deadline:
                self.kill()
                return ChildAnswer(self._data, self._too_long)
            if monotonic() >= until:
                return None

    @property
    def _too_long(self) -> str:
        return f"running it again took more than {self._limit_s:g} s"

    def kill(self) -> None:
        """End the child without an answer."""
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            elif self._pid:
                os.kill(self._pid, signal.SIGKILL)
        self._end()

    def _receive(self, timeout_s: float) -> bool:
        """Read what has come; whether the child has ended."""
        has_ended = self._pidfd in _wait_readable(self._watched, timeout_s)
        while True:
            try:
                piece = os.read(self._reader, 1 << 20)
            except BlockingIOError:
                return has_ended
            if not piece:
                return True
            self._received += piece

    def _decode(self) -> ChildAnswer | None:
        """The final answer, if all of it is there. Preliminary ones are stored."""
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > MAX_ANSWER:
                return ChildAnswer(self._data, "the process that ran it again gave an answer that cannot be read")
            if len(self._received) < _LENGTH.size + length:
                return None
            message = json.loads(self._received[_LENGTH.size : _LENGTH.size + length])
            del self._received[: _LENGTH.size + length]
            if message["failure"]:
                return ChildAnswer(self._data, message["failure"])
            self._data = message["data"]
            if message["is_final"]:
                return ChildAnswer(self._data)
        return None

    def _end(self) -> int | None:
        """Reap the child and close what belongs to it; its status, None where somebody else has reaped it."""
        status = None
        pid, self._pid = self._pid, 0
        if pid:
            with contextlib.suppress(ChildProcessError):
                _, status = os.waitpid(pid, 0)
            os.close(self._reader)
            if self._pidfd is not None:
                os.close(self._pidfd)
        return status


def run_in_child(work: Work, *, limit_s: float = LIMIT_S) -> ChildAnswer:
    """Run `work` in a child and wait for its answer."""
    try:
        child = ReplayChild(work, limit_s=limit_s)
    except CannotReplay as error:
        return ChildAnswer(None, str(error))
    return child.poll(limit_s + 1) or ChildAnswer(None, f"running it again took more than {limit_s:g} s")


def check_memory(step_bytes: int) -> None:
    """While a child lives, every page that a step writes is copied. Raises `CannotReplay` where there is no memory for `step_bytes` of
    parameters, gradients and optimizer state."""
    available = process_memory.available()
    if available is not None and step_bytes + SPARE_BYTES > available:
        needed = (step_bytes + SPARE_BYTES) / 2**30
        raise CannotReplay(f"a second process may need {needed:.1f} GB of memory, and {available / 2**30:.1f} GB are free")


def can_fork() -> bool:
    """Whether this system can copy a process. Windows cannot; on macOS, system libraries fail in a forked child."""
    return hasattr(os, "fork") and sys.platform != "darwin"


# ---- forking


def _fork() -> int:
    """Fork without the at-fork handlers of the user and of libraries in this process: by `_Fork` of glibc 2.34 and newer.

    After an ordinary fork, autograd refuses to work in the child where torch sees an accelerator.
    """
    if not can_fork():
        raise OSError(0, "this system cannot copy a process")
    libc = ctypes.PyDLL(None, use_errno=True)
    if not hasattr(libc, "_Fork"):
        if torch.accelerator.is_available():
            raise OSError(0, "autograd does not work in a forked process beside an accelerator")
        return os.fork()
    import _imp

    fork, after_fork_in_child = libc._Fork, libc.PyOS_AfterFork_Child
    after_fork_in_child.restype = None
    _imp.acquire_lock()
    # Both calls in one expression that runs in C: between two statements Python may hand the GIL to a thread that waits for it, and in
    # the child there is none. There the first call gives 0, so the second one follows: it resets the GIL and releases the import lock.
    pid: int = next(filter(None, map(operator.call, (fork, after_fork_in_child))), 0)
    if pid == 0:
        return 0
    _imp.release_lock()
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return pid


def _run_and_exit(work: Work, writer: int, keep: Collection[int], limit_s: float) -> None:
    """In the child: run and answer. Never returns."""
    try:
        try:
            process_memory.heap()  # it takes every lock of malloc: here and not later a child hangs
            _send(writer, is_final=False)  # it has started
            isolate((writer, *keep), limit_s)
            _send(writer, data=work(lambda data: _send(writer, data=data, is_final=False)))
        except BaseException as error:  # KeyboardInterrupt and SystemExit of the user's code too
            _send(writer, failure=describe_failure(error))
    finally:
        os._exit(0)


def _send(writer: int, *, data: Mapping[str, Any] | None = None, failure: str = "", is_final: bool = True) -> None:
    text = json.dumps({"data": data, "failure": failure, "is_final": is_final}).encode()
    message = memoryview(_LENGTH.pack(len(text)) + text)
    while message:
        message = message[os.write(writer, message) :]


def _open_pidfd(pid: int) -> int | None:
    try:
        return move_apart(os.pidfd_open(pid))
    except (AttributeError, OSError):  # an old kernel, or the child is gone already and somebody has reaped it
        return None


def _wait_readable(descriptors: Collection[int], timeout_s: float) -> set[int]:
    poller = select.poll()  # not select: a program with more than 1024 open files
    for number in descriptors:
        poller.register(number, select.POLLIN)
    return {number for number, _ in poller.poll(timeout_s * 1000)}


def _describe(status: int | None) -> str:
    if status is None:
        return "its exit status is unknown"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"killed by {signal.Signals(number).name}" if number in signal.valid_signals() else f"killed by signal {number}"
    return f"exit status {os.waitstatus_to_exitcode(status)}"

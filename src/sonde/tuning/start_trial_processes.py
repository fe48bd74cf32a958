"""Starts the processes of the trials from the parent, one at a time, and kills those that exceed their limit. Does not import torch."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Self

from sonde.errors import SondeError
from sonde.tuning.trial_messages import Trial, TrialRequest, read_trial

CAN_FORK = sys.platform == "linux"  # elsewhere forking is missing, or breaks system libraries that torch uses
POLL_S = 0.05


class TrialProcesses:
    """Runs trials; a context manager that ends the fork server."""

    def __init__(self, folder: Path, *, fork: bool = CAN_FORK) -> None:
        self.folder, self._forks = folder, fork
        self._fork_server: ForkServer | None = None
        self._num = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fork_server is not None:
            self._fork_server.close()

    def run(self, request: TrialRequest, *, name: str, limit_s: float, tick: Callable[[int], None]) -> Trial:
        """Run one trial until it ends or reaches its limit. `tick` is called with the number of its steps."""
        self._num += 1
        stem = self.folder / f"{self._num:02d}-{name}"
        request = replace(request, result=f"{stem}.result", progress=f"{stem}.progress", log=f"{stem}.log")
        Path(request.progress).touch()
        began = monotonic()
        running, late = self._start(request), False
        try:
            while (code := running.poll()) is None:
                late = late or monotonic() - began > limit_s
                if late:
                    running.kill()
                sleep(POLL_S)
                tick(os.path.getsize(request.progress))
        except BaseException:
            running.kill()
            while running.poll() is None:  # its exit code must not be read as that of the next trial
                sleep(POLL_S)
            raise
        return replace(self._outcome(request, code, limit_s, late=late), wall_s=monotonic() - began, log=request.log)

    def _start(self, request: TrialRequest) -> "ForkServer | SpawnedTrial":
        if not self._forks:
            return SpawnedTrial(request)
        if self._fork_server is None:
            self._fork_server = ForkServer(self.folder / "fork_server.log")
        self._fork_server.start(request)
        return self._fork_server

    def _outcome(self, request: TrialRequest, code: int, limit_s: float, *, late: bool) -> Trial:
        result = Path(request.result)
        if result.exists():
            trial = read_trial(json.loads(result.read_text(encoding="utf-8")))
            result.unlink()
        elif late:
            num = os.path.getsize(request.progress)
            trial = Trial("stuck", f"not done after {limit_s:.0f} s, {f'at step {num}' if num else 'before its first step'}")
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            trial = Trial("failed", f"the process {how} before anything was measured")
        Path(request.progress).unlink()
        return trial


class ForkServer:
    """The process that forks the trials, one at a time, seen from the parent."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "sonde.tuning.trial_process_main"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, bufsize=0, start_new_session=True,
            )  # fmt: skip
        self._buffer, self._pid = bytearray(), 0  # of the trial that runs
        try:
            self._wait_for("ready")
        except BaseException:  # Ctrl-C: no other object could end the process yet
            self.close()
            raise

    def start(self, request: TrialRequest) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
        self._pid = int(self._wait_for("pid"))

    def poll(self) -> int | None:
        message = self._read_message(wait=False)
        return None if message is None else int(message["code"])

    def kill(self) -> None:
        for end in (os.killpg, os.kill):  # the process group exists a moment after the process
            with suppress(ProcessLookupError, PermissionError):
                end(self._pid, signal.SIGKILL)

    def _read_message(self, *, wait: bool) -> dict[str, Any] | None:
        """The next message of the server; None without `wait` if there is none yet."""
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            if not wait and not select.select([self._process.stdout], [], [], 0)[0]:
                return None
            chunk = os.read(self._process.stdout.fileno(), 4096)
            if not chunk:
                raise SondeError(f"the process that starts the trials died.\n{last_line(self._log)}\nIts output: {self._log}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        # It has no state to save, and its children die with it.
        self._process.kill()
        self._process.wait()

    def _wait_for(self, key: str) -> Any:
        message = self._read_message(wait=True)
        assert message is not None
        return message[key]


class SpawnedTrial:
    """A trial in a new interpreter, which imports torch itself."""

    def __init__(self, request: TrialRequest) -> None:
        path = Path(f"{request.progress}.request")
        path.write_text(json.dumps(asdict(request)), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "sonde.tuning.trial_process_main", str(path)]
        with Path(request.log).open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None:
            self._end_group()
        return code

    def kill(self) -> None:
        self._end_group()
        self._process.kill()
        self._process.wait()

    def _end_group(self) -> None:
        """The workers of a DataLoader outlive a process that ends by `os._exit`."""
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def last_line(log: Path | str) -> str:
    """The last line of a log: of a traceback, the error."""
    try:
        rows = Path(log).read_bytes()[-4000:].decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((row.strip() for row in reversed(rows) if row.strip()), "")

"""The processes of the trials, seen from the parent: started one by one, followed, stopped when their time is over. No torch here."""

from __future__ import annotations

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
from typing import Any, Protocol

from sonde.errors import SondeError
from sonde.tuning.messages import Request, Trial, read_trial

CAN_FORK = sys.platform == "linux"  # elsewhere forking is missing, or breaks system libraries that torch uses
LOOKED_AT_EVERY_S = 0.05


class Running(Protocol):
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...


class Processes:
    """Use as a context: on leaving, nothing of it runs any more."""

    def __init__(self, folder: Path, *, fork: bool = CAN_FORK) -> None:
        self.folder, self._forks = folder, fork
        self._nursery: Nursery | None = None
        self._num = 0

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        if self._nursery is not None:
            self._nursery.close()

    def run(self, request: Request, *, name: str, limit_s: float, tick: Callable[[int], None]) -> Trial:
        """One trial to its end, or to its limit. `tick` is told how many steps it has made."""
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
                sleep(LOOKED_AT_EVERY_S)
                tick(os.path.getsize(request.progress))
        except BaseException:
            running.kill()
            while running.poll() is None:  # its last word must not be taken for that of the next one
                sleep(LOOKED_AT_EVERY_S)
            raise
        trial = self._outcome(request, code, limit_s, late=late)
        return replace(trial, wall_s=monotonic() - began, log=request.log)

    def _start(self, request: Request) -> Running:
        if not self._forks:
            return Alone(request)
        if self._nursery is None:
            self._nursery = Nursery(self.folder / "nursery.log")
        return self._nursery.start(request)

    def _outcome(self, request: Request, code: int, limit_s: float, *, late: bool) -> Trial:
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


class Nursery:
    """The process that forks the trials."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "sonde.tuning.fork_server"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, bufsize=0, start_new_session=True,
            )  # fmt: skip
        self._heard = bytearray()
        try:
            self._wait_for("ready")
        except BaseException:  # Ctrl-C: nobody knows of it yet who could end it
            self.close()
            raise

    def start(self, request: Request) -> Forked:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
        return Forked(self, int(self._wait_for("pid")))

    def answer(self, *, wait: bool) -> dict[str, Any] | None:
        """The next line that it says; None where it has said nothing yet and nobody wants to wait."""
        assert self._process.stdout is not None
        while b"\n" not in self._heard:
            if not wait and not select.select([self._process.stdout], [], [], 0)[0]:
                return None
            chunk = os.read(self._process.stdout.fileno(), 4096)
            if not chunk:
                raise SondeError(f"the process that starts the trials died.\n{last_line(self._log)}\nIts output: {self._log}")
            self._heard += chunk
        line, _, rest = self._heard.partition(b"\n")
        self._heard = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        # It has nothing of its own to lose, and what it started dies with it.
        self._process.kill()
        self._process.wait()

    def _wait_for(self, word: str) -> Any:
        answer = self.answer(wait=True)
        assert answer is not None
        return answer[word]


class Forked:
    """A trial that the nursery started."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self._pid = nursery, pid

    def poll(self) -> int | None:
        answer = self._nursery.answer(wait=False)
        return None if answer is None else int(answer["code"])

    def kill(self) -> None:
        for end in (os.killpg, os.kill):  # the group is there a moment after the process is
            with suppress(ProcessLookupError, PermissionError):
                end(self._pid, signal.SIGKILL)


class Alone:
    """A trial in a fresh interpreter, which imports torch by itself."""

    def __init__(self, request: Request) -> None:
        path = Path(f"{request.progress}.request")
        path.write_text(json.dumps(asdict(request)), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "sonde.tuning.trial", str(path)]
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
        """Workers of a DataLoader outlive a process that ends on the spot."""
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def last_line(log: Path | str) -> str:
    """What a log ends with: of a traceback, the error."""
    try:
        rows = Path(log).read_bytes()[-4000:].decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((row.strip() for row in reversed(rows) if row.strip()), "")

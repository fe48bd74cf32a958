"""A process that imports torch once and forks a child for every trial: importing torch takes longer than most trials.

Requests are lines of JSON on stdin. The answers on stdout are the child's process id at once, and its exit code when it has ended. torch is
imported here but never used: its threads and devices do not survive a fork.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from typing import Any

from sonde.run_as_main import die_with_parent
from sonde.statistics.private_torch_api import load_compiler
from sonde.tuning.run_trial import redirect_streams, run_trial
from sonde.tuning.trial_messages import TrialRequest

CRASHED = 70  # EX_SOFTWARE of sysexits.h: an internal error


def main() -> None:
    load_compiler()  # here, once: the first optimizer of every trial would load it, which takes a second or two
    die_with_parent()
    write_message({"ready": os.getpid()})
    while line := read_line():
        request = TrialRequest(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()  # its DataLoader workers are killed with its process group
                die_with_parent()
                redirect_streams(request.log)
                run_trial(request)
            finally:
                os._exit(CRASHED)
        write_message({"pid": pid})
        _, status = os.waitpid(pid, 0)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        write_message({"code": os.waitstatus_to_exitcode(status)})


def read_line() -> str:
    """One line of stdin; empty at its end. Unbuffered: a child must not inherit a part of the next request."""
    line = bytearray()
    while (byte := os.read(0, 1)) and byte != b"\n":
        line += byte
    return line.decode()


def write_message(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()

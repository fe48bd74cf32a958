"""A process that has imported torch, and does nothing but fork a child for every trial: importing it again each time would take longer than
most trials. Requests come as lines of JSON on stdin; for each the child's id is answered at once, and how it ended when it has.

torch is only imported here, never used: what it starts (threads, devices) does not survive a fork.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from typing import Any

from sonde.launcher import die_with_parent
from sonde.statistics.torch_internals import load_compiler
from sonde.tuning.messages import Request
from sonde.tuning.trial import run_trial, take_streams

CRASHED = 70  # by convention: an error inside


def main() -> None:
    load_compiler()  # here, once: the first optimizer of every trial would load it, which takes a second or two
    die_with_parent()
    say({"ready": os.getpid()})
    while line := hear():
        request = Request(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()  # so that its workers can be ended with it
                die_with_parent()
                take_streams(request.log)
                run_trial(request)
            finally:
                os._exit(CRASHED)
        say({"pid": pid})
        _, status = os.waitpid(pid, 0)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        say({"code": os.waitstatus_to_exitcode(status)})


def hear() -> str:
    """One line of stdin; empty at its end. Unbuffered: a child must not inherit half of the next request."""
    line = bytearray()
    while (byte := os.read(0, 1)) and byte != b"\n":
        line += byte
    return line.decode()


def say(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()

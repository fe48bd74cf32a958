"""Runs a program under the real `sonde run`, in a process forked from a server that has torch in memory already: a second saved each time."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

TIMEOUT_S = 200  # many times what the slowest program needs on a busy machine; hanging is a failure, slowness is not

# One thread per program: they are small, and two run at a time. torch reads it when the server imports it.
os.environ["OMP_NUM_THREADS"] = "1"

_context = multiprocessing.get_context("forkserver")
# The first optimizer of a process loads torch._dynamo: nothing to learn from paying for that a hundred times.
_context.set_forkserver_preload(["torch", "torch._dynamo", "sonde.cli"])


def run_under_sonde(program: Path, directory: Path) -> tuple[Path, int, str]:
    """Runs the program with default settings. Answers where the run is, the exit code, and what was printed."""
    run, output = directory / "run", directory / "output.txt"
    process = _context.Process(target=_run, args=(program.resolve(), run, output, directory))
    process.start()
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    return run, process.exitcode if process.exitcode is not None else -1, text


def _run(program: Path, run: Path, output: Path, directory: Path) -> None:
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(directory)  # a program that writes files writes them here
    from sonde.cli import main

    sys.argv[0] = "sonde"
    main(["run", "--to", str(run), str(program)])

"""Runs a program under the real `sonde run`, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import bfloat16
import fork_server


def run_under_sonde(program: Path, directory: Path) -> tuple[Path, int, str]:
    """Runs the program with default settings, in a directory for the files it writes. Returns the run, the exit code and the output."""
    if "bfloat16" in program.read_text(encoding="utf-8"):
        bfloat16.require("linear", "convolution")
    run = directory / "run"
    done = fork_server.python("-m", "sonde", "run", "--to", run, program.resolve(), cwd=directory)
    return run, done.returncode, done.stdout + done.stderr

"""Runs a program under the real `sonde run`, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import warm


def run_under_sonde(program: Path, directory: Path) -> tuple[Path, int, str]:
    """Runs the program with default settings, in a directory for the files it writes. Answers where the run is, the exit code, and what was printed."""
    run = directory / "run"
    done = warm.python("-m", "sonde", "run", "--to", run, program.resolve(), cwd=directory)
    return run, done.returncode, done.stdout + done.stderr

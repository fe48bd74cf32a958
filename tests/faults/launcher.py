"""Runs a program under the real `sonde run`, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import bfloat16
import warm


def one_in(number: int, programs: Iterable[str]) -> list[Any]:
    """CI has time for one in so many of these; the others are run by `make programs`."""
    return [each if place % number == 0 else pytest.param(each, marks=pytest.mark.slow) for place, each in enumerate(programs)]


def run_under_sonde(program: Path, directory: Path) -> tuple[Path, int, str]:
    """Runs the program with default settings, in a directory for the files it writes. Answers where the run is, the exit code, and what was printed."""
    if "bfloat16" in program.read_text(encoding="utf-8"):
        bfloat16.require("linear", "convolution")
    run = directory / "run"
    done = warm.python("-m", "sonde", "run", "--to", run, program.resolve(), cwd=directory)
    return run, done.returncode, done.stdout + done.stderr

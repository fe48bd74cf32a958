"""What pytest does for all tests, and fixtures with sample runs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bfloat16
import fork_server
import program_choice
from fork_server import SHELL
from sample_runs import sources, write_sample_run
from sonde.cpu_bfloat16_support import OPERATIONS

# Folders and files in unit/ of the half that reads: what needs no torch there runs once, where torch is not installed (`make reading`).
READING = ("runlog", "run_view", "rules", "report", "comparison", "profiler", "render", "export", "cli", "test_spike_detection.py")


def pytest_configure(config: pytest.Config) -> None:
    operations = ", ".join(OPERATIONS)
    config.addinivalue_line("markers", f"needs_bfloat16(*operations): runs these in bfloat16 ({operations}; without a name all of them)")
    if not hasattr(config, "workerinput"):  # once, not in every worker of xdist
        bfloat16.ask()
        program_choice.seed()


def pytest_report_header() -> list[str]:
    return [f"processor: {bfloat16.found()}"] if bfloat16.found() else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if bfloat16.found():  # the header is not printed with -q
        terminalreporter.write_line(f"processor: {bfloat16.found()}")
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    if any("tests/programs/" in getattr(report, "nodeid", "") for report in reports):
        terminalreporter.write_line(f"programs: chosen by {program_choice.SEED}={program_choice.seed()}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs_bfloat16"):
        bfloat16.require(*mark.args)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unit = Path(__file__).parent / "unit"
    for item in items:
        if item.path.is_relative_to(unit) and item.path.relative_to(unit).parts[0] in READING and not item.get_closest_marker("torch"):
            item.add_marker("reading")


def pytest_collection_finish() -> None:
    """Half a million objects of pytest, torch and other libraries are set aside: collecting garbage, which many tests do, went over all
    of them each time and took a good part of CI. Tests that look for holders among the variables of modules take them back."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def sample_run(tmp_path: Path) -> Callable[..., Path]:
    """`sample_run("name", losses, …)` writes a run into tmp_path/runs."""

    def write(name: str = "sample", losses: Iterable[float] = (), **rest: Any) -> Path:
        return write_sample_run(tmp_path / "runs" / name, losses, **({"ending": {}} | rest))

    return write


@pytest.fixture
def healthy_run(sample_run: Callable[..., Path]) -> Path:
    """A loss that falls, in a loop that does everything right."""
    return sample_run("healthy", [2.0 * 0.95**i + 0.1 for i in range(100)])


@pytest.fixture
def broken_run(sample_run: Callable[..., Path]) -> Path:
    """zero_grad was forgotten and the loss ends in NaN."""
    losses = [2.0 * 1.2**i for i in range(60)] + [float("nan")] * 10
    return sample_run("broken", losses, scalars={"zero_grads": 0, "stale_updates": 1}, events=sources(), bad_layer="head")


@pytest.fixture
def sonde(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line in a process of its own, in tmp_path."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sonde", *arguments]
        variables = os.environ | SHELL | environment
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, encoding="utf-8", check=False)

    return call


@pytest.fixture
def forked_sonde(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The same, where torch is in memory already: for commands that need it."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return fork_server.python("-m", "sonde", *arguments, cwd=tmp_path, env=os.environ | SHELL | environment)

    return call

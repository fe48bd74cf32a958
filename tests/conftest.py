"""Runs for tests of the reading half, written by the real Writer from numbers that a test chooses. No torch needed."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bfloat16
import fork_server
import program_choice
from fork_server import SHELL
from sonde.bfloat16_cpu_check import OPERATIONS
from sonde.events import STATISTICS, STEP_SCALARS, Event, Kind, Site
from sonde.runlog.directory import write_run_json
from sonde.runlog.writer import Writer

CALLS = {"forwards": 1, "backwards": 1, "zero_grads": 1, "optimizer_steps": 1}
LOOP = CALLS | {"lr": 0.1, "grad_norm": 1.0, "step_ms": 10.0}
WEIGHT, OUTPUT = 1000, 2000


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


def write_sample_run(
    path: Path,
    losses: Iterable[float] = (),
    *,
    scalars: Mapping[str, float] | None = None,
    layers: tuple[str, ...] = ("encoder", "head"),
    events: Iterable[Event] = (),
    ending: Mapping[str, Any] | None = None,
    bad_layer: str = "",
) -> Path:
    """A run of one process with one step per loss; all statistics are measured in every tenth step.

    `scalars` replaces those of a sound loop, `bad_layer` puts out NaN, and `ending` is None for a run that was killed.
    """
    path.mkdir(parents=True, exist_ok=True)
    write_run_json(path, {"name": path.name})
    writer = Writer(path)
    names = STEP_SCALARS
    sites = [Site(i, "scalar", name) for i, name in enumerate(names)]
    for i, name in enumerate(layers):
        sites.append(Site(WEIGHT + i, "parameter", f"{name}.weight", type="Linear", shape=(8, 8)))
        sites.append(Site(OUTPUT + i, "output", name, type="Linear", shape=(32, 8)))
    writer.sites(sites)
    step_plan = writer.plan(Kind.STEP, ("value",), range(len(names)))
    weights = writer.plan(Kind.GRADIENT, STATISTICS, range(WEIGHT, WEIGHT + len(layers)))
    outputs = writer.plan(Kind.ACTIVATION, STATISTICS, range(OUTPUT, OUTPUT + len(layers)))
    writer.event("start", 0, {"argv": ["train.py"], "script": "train.py", "torch": "2.13.0"})
    writer.event("model", 0, {"model": "", "class": "Net", "num_parameters": 128, "num_trainable": 128})
    writer.event("optimizer", 0, {"optimizer": 0, "class": "SGD", "groups": [{"lr": 0.1}], "source": "train.py:9"})
    for event in events:
        writer.event(event.kind, event.step, event.data)
    number = -1
    for number, loss in enumerate(losses):
        values = dict.fromkeys(names, 0.0) | LOOP | (scalars or {}) | {"loss": loss, "sonde_ms": 0.1}
        if number % 10 == 0:
            values["observed"] = 1.0
            row = [64.0, 0.1, 1.0, -2.0, 2.0, 8.0, 0.0, 0.0, 0.0]
            writer.frame(weights, number, np.array([row for _ in layers]))
            bad = [64.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 60.0, 4.0]
            writer.frame(outputs, number, np.array([bad if name == bad_layer else row for name in layers]))
        if not math.isfinite(loss):  # the guard says so: a scalar that is NaN may as well not have been measured
            counts = {"num_nan": int(math.isnan(loss)), "num_inf": int(math.isinf(loss)), "num_elements": 1}
            writer.event("nonfinite", number, {"what": "loss", "where": "loss", **counts})
        writer.frame(step_plan, number, np.array([[values[name]] for name in names]))
        writer.flush()
    if ending is not None:
        writer.event("end", max(number, 0), {"how": "finished", "exit_code": 0, "exception": "", **ending})
    writer.close()
    return path


def sources(line: str = "train.py:41", text: str = "optimizer.step()") -> list[Event]:
    return [Event("source", 0, {"call": "optimizer_step", "line": line, "text": text, "optimizer": 0})]


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

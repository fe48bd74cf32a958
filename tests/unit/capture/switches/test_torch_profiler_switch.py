"""The profiler switches: the same numbers as torch's own tables, for less than torch.profiler costs by itself."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from sonde.capture.switches.torch_profiler_switch import PLAIN, TorchProfilerRun, self_times  # noqa: E402

pytestmark = pytest.mark.torch


def train(steps: int) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(8, 16)).mean().backward()
        optimizer.step()


def num_calls(work: Callable[[], Any]) -> int:
    """Calls of functions in Python and C."""
    counts = {"call": 0, "c_call": 0}

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return sum(counts.values())


def test_self_times_are_those_of_torchs_own_table() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(3)
    table = {row.key: row.self_cpu_time_total * 1e3 for row in profiler.key_averages() if row.self_cpu_time_total > 0}
    found = self_times(profiler.profiler.kineto_results.events())
    shared = table.keys() & found.keys()
    assert {"aten::addmm", "Optimizer.step#SGD.step", "aten::t"} <= shared
    # torch's times are microseconds, and it leaves an operation out of a sum if that one starts together with the operation around it.
    assert sum(found[name] for name in shared) == pytest.approx(sum(table[name] for name in shared), rel=0.05)
    assert found["aten::addmm"] == pytest.approx(table["aten::addmm"], rel=0.05)


def test_stopping_costs_less_than_half_of_the_calls_of_torchs_profiler_and_its_export(tmp_path: Path) -> None:
    run = TorchProfilerRun(tmp_path)
    assert run.start((PLAIN,), step=0)
    train(10)
    for _ in range(10):
        run.on_step_end()
    written: list[Any] = []
    own = num_calls(lambda: written.append(run.stop()))
    plain = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    plain.start()
    train(10)

    def finish() -> None:
        plain.stop()
        plain.export_chrome_trace(str(tmp_path / "plain.json.gz"))
        plain.key_averages()

    assert own < 0.5 * num_calls(finish)
    with gzip.open(tmp_path / written[0].trace, "rt", encoding="utf-8") as file, gzip.open(tmp_path / "plain.json.gz", "rt") as theirs:
        names, expected = ({event.get("name") for event in json.load(each)["traceEvents"]} for each in (file, theirs))
    assert {"aten::addmm", "Optimizer.step#SGD.step"} <= names & expected
    assert [each.name for each in (tmp_path / "traces").iterdir()] == [Path(written[0].trace).name]  # no temporary file is left

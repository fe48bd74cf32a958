"""The runs of eighteen training loops are those of version 0.1.0: the same steps, counts, events, sites and numbers.

`golden/runs-0.1.0.tar.xz` holds the logs that version 0.1.0 wrote of `training_loops.py`. They are never written again: a difference is a
regression. Numbers are compared to 1e-4, since processors add up in different orders; times and
memory are not compared.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import sonde
from training_loops import CADENCES, LOOPS, record

pytestmark = pytest.mark.torch

TIMED_EVENTS = ("xray", "transfers", "memory", "leaks", "start")  # when they come, or what they say, depends on the machine
NOT_COMPARED = ("_ms", "_mb", "_ns", "num_bytes")  # ends of names; num_bytes is the memory of the machine
# kinds of frames, events, their fields and scalars that version 0.1.0 did not have
ADDED: frozenset[str] = frozenset({"description", "num_incidents"})


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(Path(__file__).parent / "golden" / "runs-0.1.0.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "golden"


def scalars(run: sonde.Run) -> list[str]:
    names = {site.path for site in run.sites.values() if site.kind == "scalar"} - ADDED
    return sorted(name for name in names if not name.endswith(NOT_COMPARED))


def plain(value: Any) -> Any:
    """Events as they are compared: without times, numbers rounded by `approx` below."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if not key.endswith(NOT_COMPARED) and key not in ADDED}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def events(run: sonde.Run) -> list[tuple[str, int, dict[str, Any]]]:
    # Version 0.1.0 did not look at the weights that a training leaves behind.
    compared = [event for event in run.events() if event.kind not in ADDED.union(TIMED_EVENTS) and event.data.get("what") != "parameter"]
    return [(event.kind, event.step, plain(event.data)) for event in compared]


def statistics(run: sonde.Run) -> list[tuple[str, int, list[str], list[float]]]:
    """All that was measured of tensors, by kind, step and the names of the places."""
    frames = [(kind, frame) for kind in sorted(run.kinds) if kind not in ADDED.union(("step", "log")) for frame in run.frames(kind)]
    return [(kind, frame.step, [run.sites[int(i)].path for i in frame.sites], frame.values.ravel().tolist()) for kind, frame in frames]


def is_close(given: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return isinstance(given, dict) and given.keys() == expected.keys() and all(is_close(given[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return isinstance(given, list) and len(given) == len(expected) and all(map(is_close, given, expected))
    if isinstance(expected, float) and isinstance(given, (int, float)):
        return given == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True)
    return given == expected


@pytest.mark.parametrize("every", CADENCES)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_recorded_as_version_0_1_0_recorded_it(name: str, every: int, golden: Path, tmp_path: Path) -> None:
    record(name, every, tmp_path)
    given, expected = sonde.Run(tmp_path), sonde.Run(golden / f"{name}-{every}")
    assert not given.damage
    assert given.last_step == expected.last_step
    assert scalars(given) == scalars(expected)
    for series in scalars(expected):
        (steps, values), (given_steps, given_values) = expected.scalar(series), given.scalar(series)
        assert list(given_steps) == list(steps), series
        assert list(given_values) == pytest.approx(list(values), rel=1e-4, abs=1e-5, nan_ok=True), series
    for one, other in zip(events(given), events(expected), strict=True):
        assert one[:2] == other[:2]
        assert is_close(one[2], other[2]), (one, other)
    for one_frame, other_frame in zip(statistics(given), statistics(expected), strict=True):
        assert one_frame[:3] == other_frame[:3]
        assert one_frame[3] == pytest.approx(other_frame[3], rel=1e-4, abs=1e-5, nan_ok=True), one_frame[:2]

"""Each mode, each level and each setting shows in what a run holds: kinds of frames, their number, events and scalars; never in timing."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import sonde  # noqa: E402
from sonde.capture.choose_observed_steps import FIRST_STEPS  # noqa: E402
from sonde.capture.training_callbacks import subscribers  # noqa: E402
from sonde.config import DebugConfig, DebugLevel, DebugMode  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 30
GRADIENTS, LAYERS, WEIGHTS = {"gradient"}, {"activation", "activation_gradient"}, {"parameter", "update"}
SOON = {"gradient_checking_frequency": 7, "memory_profiling_frequency": 6, "performance_profiling_frequency": 5}


def train(to: Path, config: DebugConfig, *, bad_at: int = -1, steps: int = STEPS) -> sonde.DebugSession:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=to, config=config, strict=True) as session:
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 6)).square().mean()
            if step == bad_at:
                loss = loss * math.nan
            loss.backward()
            optimizer.step()
    return session


class Contents:
    """What a run holds, counted."""

    def __init__(self, path: Path) -> None:
        run = sonde.Run(path)
        frames = Counter({kind: sum(1 for _ in run.frames(kind)) for kind in run.kinds})
        self.histograms = sum(num for kind, num in frames.items() if kind.endswith("_exponents"))
        self.frames = Counter({kind: num for kind, num in frames.items() if not kind.endswith("_exponents")})
        self.steps = self.frames.pop("step", 0)
        self.events = Counter(event.kind for event in run.events())
        self.asked = sum(1 for event in run.events("xray") if event.data["why"] == "asked")
        self.scalars = {site.path for site in run.sites.values() if site.kind == "scalar"}
        self.num_sites = sum(1 for site in run.sites.values() if site.kind != "scalar")

    @property
    def kinds(self) -> set[str]:
        return set(self.frames)


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def read(mode: DebugMode = DebugMode.FULL_DEBUG, level: DebugLevel = DebugLevel.INTERMEDIATE, bad_at: int = 20) -> Contents:
        path = tmp_path_factory.mktemp("run") / "run"
        train(path, DebugConfig(mode=mode, level=level, **SOON), bad_at=bad_at)  # type: ignore[arg-type]
        return Contents(path)

    return read


# -- modes -------------------------------------------------------------------------------------------


def test_mode_none_writes_a_beginning_and_an_end(contents: Any) -> None:
    run = contents(DebugMode.NONE)
    assert run.events == {"start": 1, "end": 1}
    assert not run.steps
    assert not run.frames


def test_in_mode_none_nothing_is_put_into_torch(tmp_path: Path) -> None:
    backward = torch.autograd.backward
    model = nn.Linear(2, 1)
    with sonde.watch(model, to=tmp_path / "run", config=DebugConfig(mode=DebugMode.NONE)) as session:
        assert torch.autograd.backward is backward
        assert not subscribers()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        with session.pause():
            session.log(x=1.0)
        assert not subscribers()


@pytest.mark.parametrize("mode", [mode for mode in DebugMode if mode is not DebugMode.NONE], ids=str)
def test_every_other_mode_knows_every_step_and_its_bad_number(mode: DebugMode, contents: Any) -> None:
    run = contents(mode)
    assert run.steps == STEPS
    assert run.events["nonfinite"] >= 1


MODES = {
    DebugMode.ANOMALY_DETECTION: ({"batch"}, {"origin"}),
    DebugMode.GRADIENT_CHECKING: (GRADIENTS | LAYERS, set()),
    DebugMode.MEMORY_PROFILING: (set(), set()),
    DebugMode.PERFORMANCE_PROFILING: (set(), {"xray"}),
    DebugMode.FULL_DEBUG: (GRADIENTS | LAYERS | WEIGHTS | {"batch"}, {"origin"}),
}


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_mode_measures_its_aspects_and_no_other(mode: DebugMode, contents: Any) -> None:
    run = contents(mode)
    kinds, events = MODES[mode]
    assert run.kinds == kinds
    assert set(run.events) & {"origin", "xray"} == events
    memory = {"rss_mb", "kept_graphs"} <= run.scalars
    assert memory is (mode in (DebugMode.MEMORY_PROFILING, DebugMode.FULL_DEBUG))
    assert ("optimizer_state_mb" in run.scalars) is (mode is DebugMode.MEMORY_PROFILING)


def test_no_two_modes_write_the_same(contents: Any) -> None:
    runs = [contents(mode) for mode in DebugMode]
    what = {(frozenset(run.kinds), frozenset(run.events), frozenset(run.scalars)) for run in runs}
    assert len(what) == len(DebugMode)


def test_a_mode_observes_at_its_frequency(contents: Any) -> None:
    assert 1 <= contents(DebugMode.PERFORMANCE_PROFILING).asked <= len(range(5, STEPS, 5))  # a step that is observed is put off
    assert contents(DebugMode.FULL_DEBUG).asked == 0


# -- levels ------------------------------------------------------------------------------------------


def test_basic_has_no_layers_and_intermediate_has_them(contents: Any) -> None:
    basic, intermediate = contents(level=DebugLevel.BASIC), contents(level=DebugLevel.INTERMEDIATE)
    assert basic.kinds == GRADIENTS | {"batch"}
    assert intermediate.kinds == GRADIENTS | {"batch"} | LAYERS | WEIGHTS
    assert basic.num_sites < intermediate.num_sites


def test_advanced_takes_histograms_in_every_observed_step(tmp_path: Path) -> None:
    found = {}
    for level in (DebugLevel.INTERMEDIATE, DebugLevel.ADVANCED):
        train(tmp_path / level, DebugConfig(level=level, every=1))
        found[level] = Contents(tmp_path / level)
    advanced = found[DebugLevel.ADVANCED]
    assert advanced.frames["gradient"] == advanced.frames["batch"] == STEPS
    assert advanced.histograms % STEPS == 0
    assert advanced.histograms > 5 * found[DebugLevel.INTERMEDIATE].histograms > 0
    assert found[DebugLevel.INTERMEDIATE].frames["batch"] < STEPS


def test_expert_observes_at_the_frequencies_at_any_price(contents: Any) -> None:
    advanced, expert = contents(level=DebugLevel.ADVANCED), contents(level=DebugLevel.EXPERT)
    assert advanced.asked == 0
    assert expert.asked >= 1
    assert "optimizer_state_mb" not in advanced.scalars
    assert "optimizer_state_mb" in expert.scalars


def test_gradients_are_checked_at_least_so_often_however_small_the_budget(tmp_path: Path) -> None:
    config = {"mode": DebugMode.GRADIENT_CHECKING, "overhead_budget": 1e-9, "gradient_checking_frequency": 7}
    steps = 700  # on a fast machine the balance of a new run pays for more than a hundred observed steps
    train(tmp_path / "run", DebugConfig(**config), steps=steps)  # type: ignore[arg-type]
    observed = {frame.step for frame in sonde.Run(tmp_path / "run").frames("gradient")}
    assert set(range(0, steps, 7)) <= observed
    assert len(observed) < steps


# -- single settings -----------------------------------------------------------------------------------

TAKES_AWAY: dict[str, set[str]] = {
    "enable_tensor_inspection": LAYERS | {"batch"}, "enable_gradient_debugging": GRADIENTS, "enable_model_diagnostics": WEIGHTS,
    "log_activations": LAYERS, "log_gradients": GRADIENTS, "log_weights": WEIGHTS,
}  # fmt: skip


@pytest.mark.parametrize("setting", TAKES_AWAY)
def test_a_setting_takes_away_what_it_names(setting: str, contents: Any, tmp_path: Path) -> None:
    train(tmp_path / "run", DebugConfig(every=3, **{setting: False}), steps=4)  # type: ignore[arg-type]
    assert contents().kinds - Contents(tmp_path / "run").kinds == TAKES_AWAY[setting]


def test_without_anomaly_detection_a_bad_number_is_recorded_and_not_explained(tmp_path: Path) -> None:
    train(tmp_path / "run", DebugConfig(enable_anomaly_detection=False), bad_at=3, steps=5)
    events = Contents(tmp_path / "run").events
    assert events["nonfinite"] >= 1
    assert not events["origin"] + events["origin_unknown"]


def test_without_performance_profiling_no_step_is_profiled_line_by_line(tmp_path: Path) -> None:
    config = DebugConfig(level=DebugLevel.EXPERT, enable_performance_profiling=False, performance_profiling_frequency=2)
    train(tmp_path / "run", config, steps=12)
    assert not Contents(tmp_path / "run").events["xray"]


def test_memory_that_is_not_logged_is_not_in_the_run(tmp_path: Path) -> None:
    train(tmp_path / "run", DebugConfig(log_memory=False), steps=9)
    assert not {"rss_mb", "kept_graphs"} & Contents(tmp_path / "run").scalars
    train(tmp_path / "off", DebugConfig(enable_memory_profiling=False), steps=9)
    assert not Contents(tmp_path / "off").events["memory_limit"]


def test_times_that_are_not_logged_are_unknown_not_zero(tmp_path: Path) -> None:
    train(tmp_path / "run", DebugConfig(log_performance=False), steps=9)
    run = sonde.Run(tmp_path / "run")
    assert all(math.isnan(value) for value in run.scalar("forward_ms")[1])
    assert all(value > 0 for value in run.scalar("step_ms")[1])
    skipped = {answer.rule: answer for answer in sonde.diagnose(run).not_evaluated}
    assert "input-bound" in skipped


def test_a_sampling_rate_is_the_share_of_all_steps_that_is_observed_or_the_report_says_why_it_is_not(tmp_path: Path) -> None:
    train(tmp_path / "run", DebugConfig(overhead_budget=1.0, sampling_rate=0.25), steps=60)
    num = Contents(tmp_path / "run").frames["gradient"]
    assert FIRST_STEPS < num <= 1 + 60 * 0.25  # step 0, and fewer if the budget does not allow them on this machine
    report = sonde.diagnose(tmp_path / "run")
    summary = dict(report.run.summary)["sampling"]
    assert f"sampling: {summary}" in report.summary()
    assert summary.startswith(f"{num} of 60 steps observed")
    assert ("allowed no more" in summary) == (num < 15)


def test_the_tools_of_a_session_remember_as_much_as_is_set(tmp_path: Path) -> None:
    config = DebugConfig(max_tracked_tensors=2, max_gradient_history=3)
    with sonde.watch(nn.Linear(2, 1), to=tmp_path / "run", config=config) as session:
        assert session.tensor_inspector.max_tracked_tensors == 2
        assert session.gradient_debugger.flow.max_frames == 3


def test_pictures_are_drawn_when_they_are_wanted_and_not_otherwise(tmp_path: Path) -> None:
    train(tmp_path / "plain", DebugConfig(every=1), steps=3)
    assert not (tmp_path / "plain" / "pictures").exists()
    train(tmp_path / "drawn", DebugConfig(every=1, enable_visualization=True), steps=3)
    names = {path.name for path in (tmp_path / "drawn" / "pictures").iterdir()}
    assert {name.replace(" ", "_") for name in names} == {"dashboard.html", "gradient_norms.png", "weights.png"}


def test_the_pictures_show_every_parameter_of_a_deep_model(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path / "run", config=DebugConfig(every=1, enable_visualization=True)) as session:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    drawn = session.visualizer.get_plot("gradient norms").data["norms"], session.visualizer.get_plot("weights").data["distributions"]
    assert [len(each) for each in drawn] == [20, 20]

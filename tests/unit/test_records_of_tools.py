"""What a person records with the tools of a session, and tools that are first asked for after the training."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import sonde  # noqa: E402

pytestmark = pytest.mark.torch

RECORDING = ("tensor_inspector", "gradient_debugger", "model_diagnostics", "profiler", "memory_profiler", "stability_checker", "hooks")


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 5) -> None:
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


# ---- what a person records with the tools


def record_by_hand(session: sonde.DebugSession) -> None:
    session.tensor_inspector.inspect_tensor(torch.ones(3, 4), "logits")
    session.tensor_inspector.inspect_tensor(torch.tensor([1.0, float("nan")]), "bad")
    for step in range(5):
        session.gradient_debugger.record_gradient_flow("fc1", torch.ones(4))
        session.model_diagnostics.record_performance(sonde.ModelPerformanceMetrics(training_step=step, loss=2.0 - step))
    session.profiler.record_layer_execution("fc1", "Linear", 0.001, 0.002)
    session.memory_profiler.snapshot("start")
    session.stability_checker.check_tensor(torch.tensor([1e-7], dtype=torch.float16), "fc1")
    hook = sonde.HookBuilder("mine").trigger(sonde.HookTrigger.EVERY_FORWARD).action(sonde.HookAction.INSPECT_TENSOR)
    session.hooks.register_hook(hook.layer_patterns(["fc1"]).build())
    session.hooks.execute_hooks("fc1", torch.ones(2), (2,), True, {})


def test_what_is_recorded_by_hand_is_in_the_report_of_the_session_and_of_its_run(tmp_path: Path) -> None:
    session = sonde.DebugSession(to=tmp_path / "run", strict=True).start()
    record_by_hand(session)
    report = session.stop()
    records = dict(report.records)
    assert set(records) == set(RECORDING)
    assert records["tensor_inspector"].startswith("2 inspections of 2 tensors: bad [2] (mean 1, std 0, 1 NaN), logits [3, 4]")
    assert records["gradient_debugger"].startswith("gradients of 1 layer in 5 steps: healthy")
    assert records["model_diagnostics"].startswith("metrics of 5 steps: health")
    assert records["profiler"] == "1 timed layer: fc1 3 ms"
    assert records["memory_profiler"].startswith("1 snapshot: start")
    assert records["stability_checker"].startswith("1 tensor checked, issues in")
    assert records["hooks"] == "1 hook ran: mine 1 time"
    assert report.why_unknown.startswith("No training was watched, so no rule could judge.")
    assert "saw no training" not in report.summary()
    assert len(report.summary().splitlines()) <= 12
    assert all(sentence in report.summary() for sentence in records.values())
    read = sonde.diagnose(tmp_path / "run")
    assert (read.records, read.why_unknown) == (report.records, report.why_unknown)


def test_records_beside_a_watched_training_are_in_its_report_and_change_no_verdict(tmp_path: Path) -> None:
    model, optimizer = training()
    with sonde.watch(model, optimizer, to=tmp_path / "run", strict=True) as session:
        train(model, optimizer, 40)
        without = session.report()
        session.stability_checker.check_tensor(model[0].weight, "0")
        assert [tool for tool, _ in session.report().records] == ["stability_checker"]
        assert sonde.diagnose(tmp_path / "run").records == session.report().records
        session.clear()
        assert session.report().records == sonde.diagnose(tmp_path / "run").records == ()
    assert without.records == ()
    assert session.report().verdict == without.verdict


def test_records_of_a_session_that_measures_nothing_stand_beside_its_mode(tmp_path: Path) -> None:
    session = sonde.DebugSession({"mode": "none"}, to=tmp_path / "run", strict=True).start()
    record_by_hand(session)
    report = session.stop()
    assert report.why_unknown.startswith("Nothing was measured: the mode is 'none', so no rule could judge.")
    assert "session.tensor_inspector: 2 inspections" in report.summary()


def test_clear_of_a_session_discards_the_records_of_every_tool(tmp_path: Path) -> None:
    session = sonde.DebugSession(to=tmp_path / "run", strict=True).start()
    record_by_hand(session)
    session.clear()
    cleared = {tool for tool in RECORDING if hasattr(getattr(session, tool), "clear")}
    assert cleared >= {"model_diagnostics", "profiler", "stability_checker", "hooks"}
    assert not cleared & dict(session.stop().records).keys()
    assert not session.model_diagnostics.num_recorded


@pytest.mark.parametrize("is_closed", [False, True])
def test_the_gradient_debugger_that_is_first_asked_after_the_training_answers_from_the_run(is_closed: bool, tmp_path: Path) -> None:
    model, optimizer = training()
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=2, strict=True) as session:
        train(model, optimizer, 20)
        norm = torch.cat([model[0].weight.grad.flatten(), model[0].bias.grad]).norm().item()
        report = None if is_closed else session.gradient_debugger.analyze()
    report = session.gradient_debugger.analyze() if report is None else report
    assert report.overall_health is sonde.GradientHealth.HEALTHY
    assert list(report.layers) == ["0", "2"]
    assert report.num_steps == len(list(sonde.Run(tmp_path / "run").frames("gradient"))) == 10
    assert report.steps_counted_by == "a step is an observed step of the run"
    steps, norms = sonde.Run(tmp_path / "run").series("gradient", "0.weight", "l2")
    assert report.layers["0"].steps == tuple(steps.tolist())
    assert report.layers["0"].norms[-1] == pytest.approx(norm, rel=0.5)
    assert report.layers["0"].norms[-1] > norms[-1] > 0
    assert sonde.GradientDebugger.from_run(tmp_path / "run").analyze().layers == report.layers
    assert dict(session.report().records) == {}  # the run is not a record of the tool


def test_gradients_of_a_run_that_vanish_or_are_missing_are_named(tmp_path: Path) -> None:
    model, _ = training()
    model.append(nn.Linear(1, 1))  # never called
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True) as session:
        for _ in range(20):
            optimizer.zero_grad()
            (model[2](model[1](model[0](torch.ones(8, 4))) * 1e-12) - 3).square().mean().backward()
            optimizer.step()
    report = session.gradient_debugger.analyze()
    assert report.vanishing_layers() == ["0"]
    assert report.dead_layers() == ["3"]


def test_every_tool_that_is_first_asked_after_the_session_answers_from_its_run(tmp_path: Path) -> None:
    model, optimizer = training()
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True) as session:
        train(model, optimizer, 30)
    inspector = session.tensor_inspector
    assert {"0.weight", "gradient of 0.weight", "output of 1", "gradient of output of 2"} <= set(inspector.names())
    (info,) = inspector.history("gradient of 0.weight")
    assert info.step == 29
    assert info.stats.l2_norm == pytest.approx(model[0].weight.grad.norm().item(), rel=1e-5)
    assert (info.stats.shape, info.stats.num_bytes, info.is_alive) == ((8, 4), 128, False)
    assert "gradient of 0.weight" in str(info)
    checker = session.stability_checker
    assert checker.would_be_safe("fp16")
    assert {one.in_use.name for one in checker.checked} == {"fp32"}
    assert len(checker.checked) == len(inspector.names()) == 14
    profile = session.profiler.report()
    assert profile.step.median_ms >= profile.phases["forward"].median_ms > 0
    assert "backward" in str(profile)
    memory = session.memory_profiler.report()
    assert memory.on("cpu").peak.usage.by_category()["parameters"] == sum(p.numel() * 4 for p in model.parameters())
    assert memory.snapshots[-1].process.rss > 2**20
    assert "does not hold the size of the optimizer state" in memory.notes[-1]
    assert session.model_diagnostics.analyze().architecture.total_parameters == 49
    assert session.report().records == ()  # nothing of it was recorded by the user
    session.clear()


def test_a_tool_that_was_asked_for_and_not_used_answers_from_the_run_after_the_session(tmp_path: Path) -> None:
    model, optimizer = training()
    with sonde.watch(model, optimizer, to=tmp_path / "run", every=1, strict=True) as session:
        train(model, optimizer, 10)
        assert session.tensor_inspector.names() == session.stability_checker.checked == []
        session.profiler.record_layer_execution("mine", "Linear", 0.001, 0.002)
        session.clear()
        session.stability_checker.check_tensor(torch.ones(2), "mine")
        session.memory_profiler.snapshot("mine")
    assert session.tensor_inspector.names() == []  # the user has cleared it
    assert [one.label for one in session.memory_profiler.report().snapshots] == ["mine"]
    with sonde.watch(model, optimizer, to=tmp_path / "other", every=1, strict=True) as session:
        train(model, optimizer, 10)
        assert session.tensor_inspector.names() == session.stability_checker.checked == []
    assert "gradient of 0.weight" in session.tensor_inspector.names()
    assert session.tensor_inspector is session.tensor_inspector
    assert session.stability_checker.checked
    session.clear()
    assert session.tensor_inspector.names() == session.stability_checker.checked == []
    assert session.report().records == ()


def test_tools_of_a_session_that_saw_no_step_are_empty_as_they_are_alone(tmp_path: Path) -> None:
    session = sonde.DebugSession(to=tmp_path / "run", strict=True).start()
    session.stop()
    assert session.tensor_inspector.names() == session.stability_checker.checked == []
    assert session.gradient_debugger.analyze().overall_health is None
    for tool in (session.profiler, session.memory_profiler):
        with pytest.raises(sonde.SondeError, match="nothing was measured"):
            tool.report()

"""The public interface as users are told it: names, parameters, defaults, attributes and results, called as a user calls them.

A signature may grow by parameters that have defaults; what is listed here must not change.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import fields
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import sonde
from sonde import DebugConfig, DebugLevel, DebugMode

pytestmark = pytest.mark.torch

# What can be written in a call, in this order or by these names.
SIGNATURES = {
    "DebugSession": "config=None",
    "debug_session": "",
    "watch": "model, optimizer=None",
    "DebugSession.start": "",
    "DebugSession.stop": "",
    "DebugSession.report": "",
    "DebugSession.enable_debugging": "switches=None",
    "DebugSession.disable_debugging": "switches=None",
    "DebugSession.get_debugging_status": "",
    "DebugSession.profile_model_performance": "loader, num_batches=10",
    "TensorInspector": "max_tracked_tensors=1000",
    "TensorInspector.inspect_tensor": "tensor, name, layer=None, operation=None",
    "TensorInspector.get_tensor_info": "tensor_id",
    "TensorInspector.compare": "a, b",
    "TensorInspector.leaks": "",
    "ActivationVisualizer.register_forward_hook": "model, layer",
    "ActivationVisualizer.get_activations": "name",
    "ActivationVisualizer.plot_heatmap": "activations, path",
    "ActivationVisualizer.plot_distribution": "activations, path",
    "ActivationVisualizer.statistics": "name",
    "ActivationVisualizer.outliers": "name",
    "StabilityChecker.check_tensor": "tensor, layer=None",
    "StabilityChecker.check_model": "model, inputs",
    "StabilityChecker.get_issues": "",
    "find_origin": "model=None",
    "GradientDebugger": "max_gradient_history=200",
    "GradientDebugger.register_hooks": "model",
    "GradientDebugger.record_gradient_flow": "layer, gradients",
    "GradientDebugger.analyze": "",
    "GradientDebugger.analyze_gradient_flow": "",
    "GradientFlowAnimator": "max_frames=0, vanishing_threshold=1e-7, exploding_threshold=1e3",
    "GradientFlowAnimator.record_step": "step, gradients",
    "GradientFlowAnimator.record_model": "step, model",
    "GradientFlowAnimator.export_json": "path",
    "GradientFlowAnimator.export_csv": "path",
    "GradientFlowAnimator.export_gif": "path",
    "GradientFlowAnimator.export_html": "path",
    "WeightAnalyzer.analyze_model": "model",
    "WeightAnalyzer.plot_weight_histogram": "model, path",
    "Profiler.start": "name",
    "Profiler.stop": "name",
    "Profiler.start_timer": "name",
    "Profiler.end_timer": "name",
    "Profiler.section": "name",
    "Profiler.record_layer_execution": "name, kind, forward_time, backward_time=None, memory=0, parameters=0",
    "Profiler.profile": "model, inputs",
    "Profiler.report": "",
    "MemoryProfiler.start": "",
    "MemoryProfiler.snapshot": "label",
    "MemoryProfiler.report": "",
    "ModelDiagnostics.record_architecture": "architecture",
    "ModelDiagnostics.inspect": "model",
    "ModelDiagnostics.record_performance": "metrics",
    "PyTorchDebugger": "config=None",
    "PyTorchDebugManager": "config=None",
    "PyTorchDebugger.debug_context": "operation, model_name='', epoch=0, batch=0",
    "PyTorchDebugger.debug_forward_pass": "model, x, epoch=0, batch=0",
    "PyTorchDebugger.debug_backward_pass": "loss, model, epoch=0, batch=0",
    "PyTorchDebugger.debug_optimization_step": "optimizer, model, epoch=0, batch=0",
    "PyTorchDebugger.debug_memory_usage": "epoch=0, batch=0",
    "PyTorchDebugger.debug_performance": "operation, epoch=0, batch=0",
    "PyTorchDebugger.debug_training_step": "model, optimizer, loss_fn, x, y, epoch=0, batch=0",
    "PyTorchDebugger.debug_model_inference": "model, x",
    "PyTorchDebugger.setup_training_logging": "name",
    "PyTorchDebugger.create_debug_report": "",
    "PyTorchDebugger.create_comprehensive_report": "",
    "PyTorchDebugger.create_debug_plots": "",
    "DebugVisualizer.plot_tensor_distribution": "name, values, bins=64",
    "DebugVisualizer.plot_gradient_flow": "name, steps, gradients",
    "DebugVisualizer.get_plot_names": "",
    "DebugVisualizer.create_dashboard": "names=None",
    "TerminalVisualizer": "width=80, height=24",
    "TerminalVisualizer.ascii_histogram": "values, bins=16",
    "TerminalVisualizer.ascii_line_plot": "x, y, title=''",
    "HookBuilder": "name",
    "HookBuilder.trigger": "trigger",
    "HookBuilder.action": "action",
    "HookBuilder.layer_patterns": "patterns",
    "HookBuilder.max_executions": "num",
    "HookBuilder.build": "",
    "Hooks.register_hook": "hook",
    "Hooks.execute_hooks": "layer_name, tensor, shape=None, is_forward=True, metadata=None",
    "diagnose": "run",
    "compare": "a, b",
    "Run": "path",
    "Report.summary": "",
}

SETTINGS = {
    "mode": DebugMode.FULL_DEBUG, "level": DebugLevel.INTERMEDIATE, "enable_tensor_inspection": True, "enable_gradient_debugging": True,
    "enable_gradient_checking": True, "enable_model_diagnostics": True, "enable_visualization": False, "enable_anomaly_detection": True,
    "enable_memory_profiling": True, "enable_performance_profiling": True, "anomaly_detection_mode": "warn", "max_tracked_tensors": 1000,
    "max_gradient_history": 200, "sampling_rate": 1.0, "gradient_checking_frequency": 100, "memory_profiling_frequency": 50,
    "performance_profiling_frequency": 10, "save_debug_info": False, "output_dir": "runs", "debug_output_dir": "runs",
    "log_gradients": True, "log_activations": True, "log_weights": True, "log_memory": True, "log_performance": True,
    "overhead_budget": 0.02,
}  # fmt: skip

SWITCHES = [
    "autograd_anomaly", "autograd_profiler", "tensorboard_profiler", "memory_usage", "gradient_norms", "forward_pass", "backward_pass",
    "device_placement", "mixed_precision", "data_loading", "validation", "early_stopping", "lr_scheduling",
]  # fmt: skip

TOOLS = {
    "tensor_inspector": "TensorInspector", "gradient_debugger": "GradientDebugger", "model_diagnostics": "ModelDiagnostics",
    "hooks": "Hooks", "profiler": "Profiler", "memory_profiler": "MemoryProfiler", "weight_analyzer": "WeightAnalyzer",
    "stability_checker": "StabilityChecker", "visualizer": "DebugVisualizer",
}  # fmt: skip

COMMANDS = ["run", "diagnose", "report", "compare", "export", "replay", "profile", "explain", "doctor", "demo", "tune"]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_layer_1 = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.relu(self.attention_layer_1(x)))


class Setup:
    """A small training: model, optimizer, data and loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Classifier()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.x = torch.randn(32, 8)
        self.y = self.x[:, :3].argmax(1)
        self.loss_fn = nn.CrossEntropyLoss()

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss

    def steps(self, num: int) -> None:
        for _ in range(num):
            self.step()


@pytest.fixture
def setup(tmp_path, monkeypatch) -> Iterator[Setup]:
    monkeypatch.chdir(tmp_path)
    return Setup()


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_has_the_documented_parameters_and_defaults(name):
    function = sonde
    for part in name.split("."):
        function = getattr(function, part)
    actual = list(inspect.signature(function).parameters.values())
    actual = [each for each in actual if each.name != "self"]
    namespace: dict = {}
    exec(f"def documented({SIGNATURES[name]}): ...", namespace)
    expected = list(inspect.signature(namespace["documented"]).parameters.values())
    given = actual[: len(expected)]
    assert [(each.name, each.default) for each in given] == [(each.name, each.default) for each in expected]
    assert all(each.kind is each.POSITIONAL_OR_KEYWORD for each in given)
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    assert all(each.default is not each.empty or each.kind in optional for each in actual[len(expected) :])


def test_settings_have_their_names_and_defaults():
    config = DebugConfig()
    assert {name: getattr(config, name) for name in SETTINGS} == SETTINGS
    for name, value in SETTINGS.items():
        assert getattr(DebugConfig(**{name: value}), name) == value


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_run_can_start_with_a_switch_turned_on(switch, setup):
    # The settings of three switches have the prefix enable_, the others debug_.
    name = f"{'enable' if switch in SWITCHES[:3] else 'debug'}_{switch}"
    assert getattr(DebugConfig(), name) is False
    with sonde.DebugSession(DebugConfig(**{name: True})).attach(setup.model, setup.optimizer) as session:
        assert [each for each, status in session.get_debugging_status().items() if status["on"]] == [switch]


def test_presets_and_layers_are_settings():
    assert {DebugConfig.preset(name).level for name in ("basic", "advanced", "production")} >= {DebugLevel.BASIC, DebugLevel.ADVANCED}
    assert list(DebugConfig(layers=["encoder.*"]).layers) == ["encoder.*"]


def test_modes_levels_triggers_actions_and_severities_have_their_members():
    assert [each.name for each in DebugMode] == [
        "NONE", "ANOMALY_DETECTION", "GRADIENT_CHECKING", "MEMORY_PROFILING", "PERFORMANCE_PROFILING", "FULL_DEBUG",
    ]  # fmt: skip
    assert [each.name for each in DebugLevel] == ["BASIC", "INTERMEDIATE", "ADVANCED", "EXPERT"]
    assert {each.name for each in sonde.HookTrigger} == {"EVERY_FORWARD", "EVERY_BACKWARD", "EVERY_N_STEPS", "ON_CONDITION", "ON_ANOMALY"}
    assert {each.name for each in sonde.HookAction} == {
        "INSPECT_TENSOR", "TRACK_GRADIENTS", "SAVE_SNAPSHOT", "ALERT", "PAUSE_TRAINING", "STOP_TRAINING", "CUSTOM_CALLBACK",
    }  # fmt: skip
    assert {each.name for each in sonde.AlertSeverity} == {"INFO", "WARNING", "ERROR", "CRITICAL"}
    assert {each.name for each in sonde.GradientHealth} == {"HEALTHY", "MINOR_ISSUES", "PROBLEMS_DETECTED", "CRITICAL"}


def test_two_names_of_one_tool_are_one_class():
    assert sonde.GradientAnalyzer is sonde.GradientDebugger
    assert issubclass(sonde.PyTorchDebugManager, sonde.PyTorchDebugger)


def test_settings_come_from_files_the_environment_and_keywords(tmp_path, monkeypatch):
    from sonde.config import load_config

    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text('[tool.sonde]\nmode = "gradient_checking"\nlevel = "expert"\n', encoding="utf-8")
    assert load_config().mode is DebugMode.GRADIENT_CHECKING
    Path("sonde.json").write_text('{"level": "basic"}', encoding="utf-8")
    assert load_config().level is DebugLevel.BASIC
    Path("sonde.toml").write_text('level = "advanced"\nmax_tracked_tensors = 7\n', encoding="utf-8")
    monkeypatch.setenv("SONDE_MAX_TRACKED_TENSORS", "8")
    config = load_config(sampling_rate=0.5)
    assert (config.level, config.max_tracked_tensors, config.sampling_rate) == (DebugLevel.ADVANCED, 8, 0.5)


def test_watch_returns_a_started_session_that_logs_and_reports(setup):
    with sonde.watch(setup.model, setup.optimizer) as session:
        assert isinstance(session, sonde.DebugSession)
        for _ in range(20):
            loss = setup.step()
            session.log(loss=loss)
    report = session.report()
    assert isinstance(report, sonde.Report)
    assert report.run.num_steps == 20
    assert report.verdict in report.summary()
    assert session.run is not None
    assert sonde.diagnose(session.run).verdict == report.verdict
    assert json.loads(report.to_json())["verdict"] == report.verdict
    assert {field.name for field in fields(sonde.Finding)} >= {"rule", "severity", "where", "step", "cause", "fix", "evidence"}
    assert len(sonde.Run(session.run).scalar("loss")[1]) == 20


def test_a_session_starts_stops_and_holds_every_tool(setup):
    session = sonde.debug_session()
    assert isinstance(session, sonde.DebugSession)
    session.start()
    for _ in range(5):
        setup.step()
    for attribute, kind in TOOLS.items():
        assert isinstance(getattr(session, attribute), getattr(sonde, kind)), attribute
        assert getattr(session, attribute) is getattr(session, attribute)
    assert isinstance(session.stop(), sonde.Report)
    with sonde.DebugSession(DebugConfig(mode=DebugMode.NONE)) as other:
        setup.step()
    assert isinstance(other.report().summary(), str)


def test_thirteen_switches_can_be_turned_on_and_off(setup, caplog):
    caplog.set_level(logging.INFO, logger="sonde")
    with sonde.watch(setup.model, setup.optimizer) as session:
        assert list(session.get_debugging_status()) == SWITCHES
        session.enable_debugging(["gradient_norms", "lr_scheduling"])
        setup.step()
        setup.step()
        status = session.get_debugging_status()
        assert [name for name in SWITCHES if status[name]["on"]] == ["gradient_norms", "lr_scheduling"]
        session.disable_debugging(["gradient_norms"])
        assert not session.get_debugging_status()["gradient_norms"]["on"]
        session.disable_debugging()
        assert not any(each["on"] for each in session.get_debugging_status().values())
    assert "gradient_norms" in caplog.text


def test_all_switches_can_be_turned_on_at_once(setup, caplog):
    caplog.set_level(logging.INFO, logger="sonde")
    with sonde.watch(setup.model, setup.optimizer) as session:
        session.enable_debugging()
        setup.step()
        assert all(each["on"] for each in session.get_debugging_status().values())
        session.disable_debugging()
        assert not any(each["on"] for each in session.get_debugging_status().values())


@pytest.mark.parametrize("tool", [
    "TensorInspector", "ActivationVisualizer", "StabilityChecker", "GradientDebugger", "GradientFlowAnimator", "Profiler", "MemoryProfiler",
    "ModelDiagnostics", "DebugSession",
])  # fmt: skip
def test_a_tool_that_keeps_a_history_forgets_it(tool):
    getattr(sonde, tool)().clear()


def test_the_tensor_inspector_measures_tensors_arrays_and_lists():
    inspector = sonde.TensorInspector()
    first = inspector.inspect_tensor(torch.tensor([[1.0, 0.0], [float("nan"), -3.0]]), "scores", "encoder", "softmax")
    stats = inspector.get_tensor_info(first).stats
    assert (stats.min, stats.max, stats.num_zeros, stats.num_nan, stats.num_inf) == (-3.0, 1.0, 1, 1, 0)
    assert (stats.l1_norm, stats.shape, stats.dtype, stats.device, stats.num_bytes) == (4.0, (2, 2), "float32", "cpu", 16)
    assert stats.sparsity == 0.25
    assert stats.l2_norm == pytest.approx(math.sqrt(10))
    assert stats.mean == pytest.approx(-2 / 3)
    assert stats.std > 0
    assert stats.percentiles[50] == 0.0
    assert stats.histogram.counts.sum() == 3
    assert (stats.num_extreme, stats.num_outliers, len(stats.outliers)) == (0, 0, 0)
    other = inspector.inspect_tensor(tensor=np.ones((2, 2)), name="scores", layer="decoder", operation=None)
    inspector.inspect_tensor([1.0, 2.0], "list")
    comparison = inspector.compare(torch.ones(3), torch.tensor([1.0, 1.0, 1.5]))
    assert comparison.max_abs_difference == 0.5
    assert comparison.max_rel_difference == pytest.approx(1 / 3, rel=0.6)
    assert 0.9 < comparison.cosine < 1
    assert comparison.first_difference == (2,)
    assert comparison.distribution_distance > 0
    assert inspector.compare(first, other) is not None
    assert inspector.leaks() == []
    small = sonde.TensorInspector(max_tracked_tensors=2)
    for _ in range(5):
        small.inspect_tensor([0.0], "x")
    assert len(small.history("x")) == 2


def test_activations_are_stored_by_name_or_pattern_and_drawn(setup):
    visualizer = sonde.ActivationVisualizer()
    visualizer.register_forward_hook(setup.model, "head")
    visualizer.register_forward_hook(setup.model, "attention.*")
    output = setup.model(setup.x)
    activations = visualizer.get_activations("head")
    assert torch.equal(activations, output.detach())
    assert visualizer.get_activations("attention_layer_1").shape == (32, 16)
    assert visualizer.plot_heatmap(activations, "x.png").exists()
    assert visualizer.plot_distribution(activations, "y.png").exists()
    assert visualizer.statistics("head").num_elements == 96
    assert isinstance(visualizer.outliers("head"), tuple)


def test_the_stability_checker_names_issues_with_layer_and_kind(setup):
    checker = sonde.StabilityChecker()
    checker.check_tensor(torch.tensor([1.0, float("nan"), float("inf")]), layer="encoder")
    checker.check_tensor(torch.full((4,), 6.0e4, dtype=torch.float16), "logits")
    checker.check_tensor(torch.full((8,), 1e-40), "tiny")
    checker.check_tensor(torch.tensor([4096.0, 4098.0, 4100.0, 4094.0], dtype=torch.float16), "rounded")
    checker.check_model(setup.model, setup.x)
    issues = checker.get_issues()
    kinds = {(issue.layer, issue.kind) for issue in issues}
    assert kinds >= {("encoder", "nan"), ("encoder", "inf"), ("logits", "overflow"), ("tiny", "denormal"), ("rounded", "precision_loss")}
    assert {issue.kind for issue in checker.get_issues("fp16")} >= {"underflow"}
    assert {issue.kind for issue in issues} <= {"nan", "inf", "overflow", "underflow", "precision_loss", "denormal"}
    checked = checker.check_tensor(torch.tensor([1.0, 2.0]), "plain")
    assert checked.margins("fp16").overflow_log2 == pytest.approx(15, abs=0.1)
    for dtype in ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2"):
        checked.margins(dtype)


def test_the_origin_of_a_nan_is_named(setup):
    with sonde.find_origin(setup.model) as found:
        torch.log(setup.model(setup.x) - 1e3).sum()
    assert (found.origin.kind, found.origin.phase) == ("nan", "forward")
    assert "log" in found.origin.operation
    assert "test_public_signatures.py" in found.origin.source


def test_gradients_are_recorded_by_hooks_or_by_hand_and_analyzed(setup):
    debugger = sonde.GradientDebugger()
    debugger.register_hooks(setup.model)
    for _ in range(12):
        setup.step()
    report = debugger.analyze()
    assert list(report.layers) == ["attention_layer_1", "head"]
    assert report.overall_health is sonde.GradientHealth.HEALTHY
    layer = report.layers["head"]
    assert (len(layer.norms), len(layer.mean_abs)) == (12, 12)
    assert layer.trend in ("rising", "falling", "steady", "could not tell")
    assert isinstance(report.clipping.reason, str)
    assert report.noise_scale is not None
    by_hand = sonde.GradientAnalyzer()
    for _ in range(20):
        by_hand.record_gradient_flow("first", torch.zeros(4))
        by_hand.record_gradient_flow("second", np.full(4, 1e9))
    flow = by_hand.analyze_gradient_flow()
    assert (flow.vanishing_layers(), flow.exploding_layers(), flow.dead_layers()) == ([], ["second"], ["first"])


def test_the_gradient_flow_animator_records_frames(setup, tmp_path):
    animator = sonde.GradientFlowAnimator(max_frames=2)
    assert animator.to_ascii_animation() == "(no gradient frames recorded)"
    setup.step()
    animator.record_model(0, setup.model)
    animator.record_step(1, {"b": torch.full((2,), 2.0), "a": [1.0], "c": [float("inf")]})
    animator.record_step(2, {"b": [], "a": np.full(3, 1e-9)})
    assert [frame.step for frame in animator.frames] == [1, 2]
    a, b, c = animator.frames[0].layers
    assert [layer.name for layer in (a, b, c)] == ["a", "b", "c"]
    assert (b.mean_abs_grad, b.max_abs_grad, b.is_vanishing, b.is_exploding, b.flow_intensity) == (2.0, 2.0, False, False, 1.0)
    assert b.grad_norm == pytest.approx(math.sqrt(8))
    assert a.flow_intensity == pytest.approx(1 / math.sqrt(8))
    assert (c.is_exploding, c.flow_intensity) == (True, 1.0)
    assert all(layer.is_vanishing for layer in animator.frames[1].layers)
    assert isinstance(animator.frames[0], sonde.GradientFrame)
    assert isinstance(a, sonde.LayerGradientInfo)
    summary = animator.summary_report()
    assert isinstance(summary, sonde.GradientFlowSummary)
    assert (summary.total_steps, *summary.layers_with_vanishing_grads, *summary.layers_with_exploding_grads) == (3, "a", "b", "c")
    assert summary.overall_health is sonde.GradientHealth.CRITICAL
    assert summary.recommendations
    assert animator.export_csv(tmp_path / "new" / "flow.csv").read_text().splitlines()[0] == (
        "step,layer,mean_abs_grad,max_abs_grad,grad_norm,is_vanishing,is_exploding"
    )
    assert [frame["step"] for frame in json.loads(animator.export_json(tmp_path / "new" / "flow.json").read_text())] == [1, 2]
    assert animator.export_html(tmp_path / "flow.html").exists()
    assert animator.export_gif(tmp_path / "flow.gif").exists()
    other = sonde.GradientFlowAnimator().with_vanishing_threshold(1e-3).with_exploding_threshold(10.0)
    assert (other.vanishing_threshold, other.exploding_threshold) == (1e-3, 10.0)


def test_weights_are_analyzed_and_drawn(setup):
    with torch.no_grad():
        setup.model.attention_layer_1.weight[3] = 0
        setup.model.attention_layer_1.bias[3] = -1
    report = sonde.WeightAnalyzer().analyze_model(setup.model)
    assert [(neuron.layer, neuron.unit) for neuron in report.dead_neurons()] == [("attention_layer_1", 3)]
    values = torch.cat([p.detach().flatten() for p in setup.model.parameters()])
    assert report.mean() == pytest.approx(values.mean().item(), rel=1e-4)
    assert report.std() == pytest.approx(values.std(correction=0).item(), rel=1e-4)
    layer = report.layers["head.weight"]
    assert layer.initialization.name
    assert layer.spectrum.effective_rank > 1
    assert report.collapsed_layers() == []
    assert sonde.WeightAnalyzer().plot_weight_histogram(setup.model, "w.png").exists()


def test_the_profiler_times_sections_layers_and_models(setup, tmp_path):
    profiler = sonde.Profiler()
    profiler.start("load")
    assert profiler.stop("load") >= 0
    profiler.start_timer("augment")
    assert profiler.end_timer("augment") >= 0
    with profiler.section("all"):
        setup.step()
    profiler.record_layer_execution("encoder", "Linear", 0.002, 0.003, 4096, 128)
    profiler.record_layer_execution(name="decoder", kind="Linear", forward_time=0.001, backward_time=None, memory=64, parameters=8)
    report = profiler.report()
    assert {section.name for section in report.sections} == {"load", "augment", "all"}
    assert report.layer("encoder").forward.median_ms == pytest.approx(2.0)
    assert report.layer("encoder").backward.median_ms == pytest.approx(3.0)
    measured = sonde.Profiler().profile(setup.model, setup.x)
    layer = measured.layer("head")
    assert layer.forward.median_ms > 0
    assert layer.backward.median_ms > 0
    assert (layer.memory_bytes >= 0, layer.flops_forward) == (True, 2 * 32 * 16 * 3)
    assert 0 < measured.share(layer.total_ms) <= 1
    assert measured.samples_per_s > 0
    assert measured.flops_per_s > 0
    assert measured.utilisation
    assert isinstance(measured.mfu, float)
    assert isinstance(measured.bottlenecks(), tuple)
    assert isinstance(measured.recommendations(), tuple)
    assert str(measured.compare(measured))


def test_a_session_profiles_its_model_with_torch_profiler(setup):
    loader = [(setup.x, setup.y)] * 6
    with sonde.watch(setup.model, setup.optimizer) as session:
        setup.step()
        report = session.profile_model_performance(loader, num_batches=3)
    assert report.operations
    assert Path(report.trace).exists()


def test_the_memory_profiler_reports_the_peak_by_category_and_module(setup):
    profiler = sonde.MemoryProfiler(setup.model, setup.optimizer)
    profiler.start()
    setup.step()
    profiler.snapshot("after one step")
    setup.step()
    report = profiler.report()
    assert report.peak_gb() > 0
    assert report.leaks() == []
    device = report.devices["cpu"] if isinstance(report.devices, dict) else report.devices[0]
    assert set(device.peak.usage.by_category()) >= {"parameters", "gradients", "activations"}
    assert device.timeline
    assert device.peak.usage.by_module()
    assert device.allocated is None or device.reserved is None or device.fragmentation is None or 0 <= device.fragmentation <= 1
    assert [snapshot.label for snapshot in report.snapshots] == ["after one step"]
    profiler.stop()
    assert sonde.MemoryProfiler().forecast(setup.model, setup.x, batch_size=64).peak_bytes > 0


def test_model_diagnostics_records_architecture_and_performance(setup):
    diagnostics = sonde.ModelDiagnostics()
    assert diagnostics.inspect(setup.model).total_parameters == sum(p.numel() for p in setup.model.parameters())
    diagnostics.record_architecture(sonde.ModelArchitectureInfo(total_parameters=1000))
    for step in range(60):
        diagnostics.record_performance(sonde.ModelPerformanceMetrics(
            training_step=step, loss=2.0 * 0.95**step, accuracy=0.5, learning_rate=0.1, batch_size=32, throughput_samples_per_sec=100.0,
            memory_usage_mb=50.0, gpu_utilization=0.8, timestamp=datetime(2026, 1, 1),
        ))  # fmt: skip
    report = diagnostics.report()
    assert 0 <= report.health_score <= 100
    assert diagnostics.health_score == report.health_score
    assert report.health.parts
    dynamics = report.dynamics
    for name in ("convergence", "stability", "plateau", "overfitting", "efficiency", "anomalies"):
        assert hasattr(dynamics, name), name
    assert isinstance(report.recommendations, tuple)


def test_the_debugger_of_hand_written_loops_measures_every_operation(setup):
    manager = sonde.PyTorchDebugManager(DebugConfig(debug_output_dir="debug"))
    with manager.debug_context("custom", "Classifier", 1, 2) as info:
        assert isinstance(info, sonde.DebugInfo)
        assert (info.execution_time >= 0, info.gradient_norm) == (True, 0.0)
    names = (
        "timestamp mode level operation model_name epoch batch execution_time memory_usage gpu_memory gradient_norm anomaly_detected "
        "memory_leak_detected performance_issue_detected"
    )
    assert all(hasattr(info, name) for name in names.split())
    assert isinstance(info.timestamp, datetime)
    assert (info.operation, info.model_name, info.epoch, info.batch) == ("custom", "Classifier", 1, 2)
    output = manager.debug_forward_pass(setup.model, setup.x)
    assert output.shape == (32, 3)
    setup.optimizer.zero_grad()
    norm = manager.debug_backward_pass(setup.loss_fn(output, setup.y), setup.model)
    assert norm == pytest.approx(torch.nn.utils.get_total_norm([p.grad for p in setup.model.parameters()]).item(), rel=1e-5)
    assert isinstance(manager.debug_optimization_step(setup.optimizer, setup.model), float)
    cpu_mb, gpu_mb = manager.debug_memory_usage()
    assert cpu_mb > 1
    assert isinstance(gpu_mb, float)
    assert manager.debug_performance("forward_pass") > 0
    assert isinstance(manager.logger, logging.Logger)
    assert isinstance(manager.debugger, sonde.PyTorchDebugger)
    manager.setup_training_logging("training")
    manager.training_logger.log_batch_metrics({"loss": 0.5})
    result = manager.debug_training_step(setup.model, setup.optimizer, setup.loss_fn, setup.x, setup.y, epoch=0, batch=0)
    assert set(result) == {"loss", "gradient_norm", "param_norm", "cpu_memory", "gpu_memory", "execution_time"}
    assert manager.debug_model_inference(setup.model, setup.x)["output"].shape == (32, 3)
    report = manager.create_comprehensive_report()
    sections = ["summary", "performance_analysis", "memory_analysis", "gradient_analysis", "operation_breakdown"]
    assert list(manager.create_debug_report())[:5] == sections
    assert set(report["summary"]) == {
        "total_debug_operations", "anomalies_detected", "memory_leaks_detected", "performance_issues_detected", "debug_mode", "debug_level",
    }  # fmt: skip
    assert set(report["performance_analysis"]) == {"average_execution_time", "max_execution_time", "min_execution_time"}
    assert set(report["memory_analysis"]) == {"average_memory_usage", "max_memory_usage", "average_gpu_memory", "max_gpu_memory"}
    assert set(report["gradient_analysis"]) == {"average_gradient_norm", "max_gradient_norm", "gradient_anomalies"}
    assert report["operation_breakdown"]["custom"] == 1
    assert manager.create_debug_plots() == Path("debug") / "debug_analysis.png"
    assert Path("debug/training.log").exists()
    assert len(manager.debug_history) == report["summary"]["total_debug_operations"]
    for history in (manager.memory_history, manager.performance_history, manager.gradient_history):
        assert all(isinstance(value, float) for value in history)
        assert history
    for flag in ("anomaly_detection_active", "gradient_checking_active", "memory_profiling_active", "performance_profiling_active"):
        assert getattr(manager, flag) is True
    manager.close()


def test_anomaly_mode_of_the_user_stays_on_and_empty_reports_have_no_averages(setup):
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        debugger = sonde.PyTorchDebugger(DebugConfig(mode=DebugMode.ANOMALY_DETECTION))
        debugger.debug_training_step(setup.model, setup.optimizer, setup.loss_fn, setup.x, setup.y)
        assert torch.is_anomaly_enabled()
    assert not torch.is_anomaly_enabled()
    empty = sonde.PyTorchDebugger().create_debug_report()
    assert empty["summary"]["total_debug_operations"] == 0
    assert json.loads(empty.to_json())


def test_warn_and_raise_differ(setup):
    def bad_loss(output, target):
        return (output * float("nan")).sum()

    warns = sonde.PyTorchDebugger(DebugConfig(anomaly_detection_mode="warn"))
    assert math.isnan(warns.debug_training_step(setup.model, setup.optimizer, bad_loss, setup.x, setup.y)["loss"])
    raises = sonde.PyTorchDebugger(DebugConfig(anomaly_detection_mode="raise"))
    with pytest.raises(sonde.NonFiniteError):
        raises.debug_training_step(Setup().model, setup.optimizer, bad_loss, setup.x, setup.y)


def test_the_visualizer_draws_files_and_a_page(tmp_path):
    for form in ("png", "svg", "pdf", "html", "data"):
        visualizer = sonde.DebugVisualizer(sonde.VisualizationConfig(output_directory=tmp_path / form, format=form))
        assert visualizer.plot_tensor_distribution("weights", torch.randn(100), 20).exists()
        assert visualizer.plot_gradient_flow("flow", [0, 1, 2], [1.0, float("nan"), 0.5]).exists()
        assert visualizer.get_plot_names() == ["weights", "flow"]
        assert visualizer.create_dashboard(["weights", "flow"]).exists()


def test_the_terminal_visualizer_draws_nan_and_inf():
    terminal = sonde.TerminalVisualizer(width=80, height=24)
    histogram = terminal.ascii_histogram([1.0, 2.0, float("nan"), float("inf")], bins=4)
    assert "NaN" in histogram
    assert "Inf" in histogram
    plot = terminal.ascii_line_plot([0, 1, 2], [1.0, float("nan"), 2.0], "loss")
    assert "loss" in plot
    assert "NaN" in plot
    assert max(map(len, plot.splitlines())) <= 80


def test_hooks_are_built_registered_and_executed(setup):
    hook = (
        sonde.HookBuilder("inspect attention")
        .trigger(sonde.HookTrigger.EVERY_FORWARD)
        .action(sonde.HookAction.INSPECT_TENSOR)
        .layer_patterns(["attention.*"])
        .max_executions(100)
        .build()
    )
    with sonde.watch(setup.model, setup.optimizer) as session:
        hook_id = session.hooks.register_hook(hook)
        assert isinstance(hook_id, str)
        setup.step()
        assert {result.layer for result in session.hooks.results} == {"attention_layer_1"}
        tensor = torch.ones(2, 3)
        results = session.hooks.execute_hooks("attention_layer_1", tensor, [2, 3], True, {"batch": 1})
        assert [result.hook for result in results] == [hook_id]
        assert session.hooks.execute_hooks("head", tensor, (2, 3), True, None) == []


def test_alerts_reach_a_function_and_stop_training_stops(setup):
    alerts = []
    hooks = sonde.Hooks()
    hooks.send_alerts_to(alerts.append, at_least=sonde.AlertSeverity.WARNING)
    loud = sonde.HookBuilder("loud").trigger("on_condition").when("max_abs > 0").alert(sonde.AlertSeverity.WARNING, "large").build()
    called = []
    own = sonde.HookBuilder("own").trigger(sonde.HookTrigger.EVERY_BACKWARD).callback(called.append).build()
    stop = sonde.HookBuilder("stop").trigger(sonde.HookTrigger.EVERY_N_STEPS).every_n_steps(2).action("stop_training").build()
    for each in (loud, own, stop):
        hooks.register_hook(each)
    hooks.attach(setup.model, setup.optimizer)
    with pytest.raises(sonde.TrainingStopped):
        setup.steps(20)
    hooks.detach()
    assert alerts
    assert alerts[0].severity is sonde.AlertSeverity.WARNING
    assert called


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_frameworks_have_a_callback(framework):
    pytest.importorskip(framework)
    module = pytest.importorskip(f"sonde.integrations.{framework}")
    assert callable(module.SondeCallback)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_help_with_an_example(command):
    from click.testing import CliRunner

    from sonde.cli import group

    done = CliRunner().invoke(group, [command, "--help"])
    assert done.exit_code == 0, done.output
    assert "Example" in done.output


def test_commands_answer_by_exit_codes(healthy_run, broken_run, tmp_path, capsys):
    def call(*arguments: str | Path) -> int:
        with pytest.raises(SystemExit) as left:
            main([str(each) for each in arguments])
        return int(left.value.code)

    from sonde.cli import main

    assert call("diagnose", healthy_run) == 0
    capsys.readouterr()
    assert call("diagnose", broken_run, "--json") == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "problems"
    assert call("diagnose", tmp_path / "nothing") == 2
    assert call("diagnose", "--no-such-option") == 2
    for name in ("report.html", "report.md", "report.json"):
        call("report", broken_run, "-o", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 0
    call("compare", healthy_run, broken_run)
    assert "broken" in capsys.readouterr().out
    for form in ("perfetto", "parquet"):
        assert call("export", healthy_run, "--to", form) == 0
    assert call("explain", "missing-zero-grad") == 0
    assert "zero_grad" in capsys.readouterr().out

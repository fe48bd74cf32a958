"""Wrong input gets a sentence: what was given, and what to write instead. No call of the public interface answers with an error from
inside of Python, such as `'NoneType' object is not iterable`.

Errors of the model or of torch in a call that the user asked for (a forward with a wrong shape) are the user's own and pass unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import sonde
from sonde.errors import SondeError

pytestmark = pytest.mark.torch

WIDE = torch.zeros(2, 9)  # the model takes four features
TYPO = "enable_gradient_debuging"

# A call with BAD in the place of the wrong value, and the value. A third item is what the message must contain instead of the value
# or its type.
FOUND_BY_USERS: list[tuple[Any, ...]] = [
    ("DebugVisualizer(BAD)", 3),
    ("VisualizationConfig(output_directory=BAD)", None),
    ("visualizer.plot_tensor_distribution(BAD, [1.0, 2.0])", None),
    ("visualizer.plot_gradient_flow(BAD, [0], [1.0])", None),
    ("visualizer.plot_weight_histogram(BAD, model)", None),
    ("watch(model, optimizer, config=BAD)", {TYPO: True}, TYPO),
    ("watch(model, optimizer, config=BAD)", "fast"),
    ("DebugSession(BAD)", {TYPO: True}, TYPO),
    ("DebugSession(BAD)", 3),
    ("session.enable_debugging(BAD)", 3),
    ("GradientDebugger().register_hooks(model, BAD)", "opt"),
    ("PyTorchDebugger().debug_optimization_step(BAD, model)", None),
    ("profile.layer(BAD)", "typo"),
    ("profile.compare(BAD)", None),
    ("session.profile_model_performance(BAD)", None),
    ("ActivationVisualizer().plot_heatmap(x, BAD)", None),
    ("GradientFlowAnimator().export_json(BAD)", None),
    ("Run(BAD)", None),
    ("diagnose(BAD)", None),
]

FURTHER: list[tuple[Any, ...]] = [
    ("DebugConfig(mode=BAD)", 3),
    ("DebugConfig(level=BAD)", "deep"),
    ("DebugConfig(sampling_rate=BAD)", "often"),
    ("DebugConfig(output_dir=BAD)", None),
    ("DebugConfig(anomaly_detection_mode=BAD)", ["warn"]),
    ("DebugConfig(enable_anomaly_detection=BAD)", None),
    ("DebugConfig(**{BAD: True})", TYPO),
    ("watch(BAD)", None),
    ("watch(BAD)", [1]),
    ("watch(model, BAD)", "sgd"),
    ("watch(model, optimizer, every=BAD)", 0),
    ("watch(model, optimizer, to=BAD)", 3),
    ("watch(model, optimizer, to=BAD)", ""),
    ("watch(model, optimizer, name=BAD)", 3),
    ("step(BAD)", 3),
    ("session.enable_debugging(BAD)", "gradient_norm"),
    ("session.disable_debugging(BAD)", 3),
    ("session.when(BAD, 'gradient_norms')", None),
    ("session.when(BAD, 'gradient_norms')", "loss >"),
    ("session.when('loss > 3', BAD)", None),
    ("session.metric('accuracy', BAD)", None),
    ("session.metric(BAD, len)", None),
    ("session.early_stopping(patience=BAD)", "long"),
    ("session.early_stopping(mode=BAD)", "up"),
    ("session.early_stopping().step(BAD)", None),
    ("session.training_step(BAD)", 3),
    ("session.log_metrics(BAD)", [1]),
    ("session.profile_model_performance(BAD)", [], "0 batches"),
    ("session.profile_model_performance(loader, num_batches=BAD)", 0),
    ("session.profile_model_performance(loader, 1, loss_fn=BAD)", 3),
    ("session.profile_model_performance(loader, 1, optimizer=BAD)", "sgd"),
    ("TensorInspector(BAD)", "many"),
    ("TensorInspector().inspect_tensor(BAD, 'x')", None),
    ("TensorInspector().inspect_tensor(BAD, 'x')", {"a": 1}),
    ("TensorInspector().inspect_tensor([1.0], BAD)", None),
    ("TensorInspector().inspect_tensor([1.0], 'x', bins=BAD)", 0),
    ("inspector.get_tensor_info(BAD)", "los#1"),
    ("inspector.get_tensor_info(BAD)", ["loss"]),
    ("inspector.history(BAD)", None),
    ("inspector.compare([1.0], BAD)", "typo"),
    ("inspector.compare([1.0], BAD)", None),
    ("inspector.holders(x, max_chains=BAD)", "all"),
    ("inspector.plot('loss', BAD)", 3),
    ("ActivationVisualizer(BAD)", 0),
    ("ActivationVisualizer().register_forward_hook(BAD, '0')", None),
    ("ActivationVisualizer().register_forward_hook(model, BAD)", None),
    ("ActivationVisualizer().register_forward_hook(model, BAD)", "typo"),
    ("activations.get_activations(BAD)", "typo"),
    ("activations.get_activations(BAD)", ["0"]),
    ("activations.plot_heatmap(BAD, 'x.png')", None),
    ("activations.plot_heatmap(x, 'x.png', units=BAD)", "rows"),
    ("activations.plot_distribution(x, BAD)", "x.xyz"),
    ("activations.plot_distribution(x, BAD)", None),
    ("StabilityChecker().check_tensor(BAD)", "text"),
    ("StabilityChecker().check_model(BAD, x)", None),
    ("StabilityChecker().check_model(model, BAD)", WIDE, "2x9"),
    ("StabilityChecker().check_model(model, x, loss=BAD)", 3),
    ("StabilityChecker().get_issues(BAD)", "fp17"),
    ("StabilityChecker().would_be_safe(BAD)", None),
    ("find_origin(BAD)", 3),
    ("GradientDebugger(BAD)", 0),
    ("GradientDebugger(micro_batch_size=BAD)", "large"),
    ("GradientDebugger().register_hooks(BAD)", None),
    ("GradientDebugger().record_gradient_flow(BAD, [1.0])", None),
    ("GradientDebugger().record_gradient_flow('a', BAD)", None),
    ("GradientDebugger().record_model(BAD)", None),
    ("GradientDebugger().record_norm_at(BAD, 1.0)", None),
    ("GradientDebugger().record_norm_at(32, BAD)", "large"),
    ("GradientFlowAnimator(BAD)", -1),
    ("GradientFlowAnimator().with_exploding_threshold(BAD)", "large"),
    ("GradientFlowAnimator().record_step(BAD, {})", None),
    ("GradientFlowAnimator().record_step(0, BAD)", [1.0]),
    ("GradientFlowAnimator().record_step(0, {'a': BAD})", "text"),
    ("GradientFlowAnimator().record_model(0, BAD)", None),
    ("GradientFlowAnimator().export_csv(BAD)", 3),
    ("GradientFlowAnimator().export_html(BAD)", None),
    ("GradientFlowAnimator().export_gif(BAD)", "flow.png"),
    ("WeightAnalyzer().analyze_model(BAD)", None),
    ("WeightAnalyzer().analyze_model(model, BAD)", WIDE, "2x9"),
    ("WeightAnalyzer().analyze_model(model).dead_neurons(BAD)", "weight"),
    ("WeightAnalyzer().plot_weight_histogram(model, BAD)", None),
    ("Profiler().start(BAD)", None),
    ("Profiler().end_timer(BAD)", "typo"),
    ("Profiler().end_timer(BAD)", ["load"]),
    ("Profiler().record_layer_execution('a', 'Linear', BAD)", None),
    ("Profiler().record_layer_execution('a', 'Linear', BAD)", -1.0),
    ("Profiler().record_layer_execution('a', 'Linear', 1.0, BAD)", "long"),
    ("Profiler().profile(BAD, x)", None),
    ("Profiler().profile(model, BAD)", WIDE, "2x9"),
    ("Profiler().profile(model, x, loss=BAD)", 3),
    ("Profiler().profile(model, x, repeats=BAD)", 0),
    ("profile.layer(BAD)", None),
    ("profile.save(BAD)", None),
    ("profile.save(BAD)", "x.xyz"),
    ("type(profile).load(BAD)", None),
    ("type(profile).load(BAD)", "nothing.json"),
    ("MemoryProfiler(BAD)", "model"),
    ("MemoryProfiler().attach(model, BAD)", "sgd"),
    ("MemoryProfiler().forecast(model, BAD, batch_size=8)", WIDE, "[2, 9]"),
    ("MemoryProfiler().forecast(model, x, batch_size=BAD)", 0),
    ("ModelDiagnostics(BAD)", "runs/base"),
    ("ModelDiagnostics.from_run(BAD)", None),
    ("ModelDiagnostics().inspect(BAD)", None),
    ("ModelDiagnostics().record_architecture(BAD)", {"total_parameters": 3}),
    ("ModelDiagnostics().record_performance(BAD)", {"loss": 1.0}),
    ("ModelArchitectureInfo(total_parameters=BAD)", None),
    ("ModelArchitectureInfo(total_parameters=3, layer_types=BAD)", None),
    ("ModelArchitectureInfo(total_parameters=3, model_size_mb=BAD)", "small"),
    ("ModelPerformanceMetrics(training_step=0, loss=BAD)", None),
    ("ModelPerformanceMetrics(training_step=BAD, loss=1.0)", "first"),
    ("PyTorchDebugger(BAD)", "fast"),
    ("PyTorchDebugger(session=BAD)", 3),
    ("PyTorchDebugger().debug_context(BAD).__enter__()", None),
    ("PyTorchDebugger().debug_forward_pass(BAD, x)", None),
    ("PyTorchDebugger().debug_backward_pass(BAD, model)", None),
    ("PyTorchDebugger().debug_backward_pass(BAD, model)", torch.zeros(5, 2), "[5, 2]"),
    ("PyTorchDebugger().debug_optimization_step(BAD, optimizer)", nn.ReLU()),
    ("PyTorchDebugger().debug_optimization_step(optimizer, model, closure=BAD)", 3),
    ("PyTorchDebugger().debug_performance(BAD)", "typo"),
    ("PyTorchDebugger().debug_training_step(model, optimizer, BAD, x, x)", None),
    ("PyTorchDebugger().setup_training_logging(BAD)", None),
    ("PyTorchDebugger().create_debug_plots(BAD)", 3),
    ("VisualizationConfig(format=BAD)", None),
    ("VisualizationConfig(dpi=BAD)", "150"),
    ("visualizer.plot_tensor_distribution('w', BAD)", None),
    ("visualizer.plot_tensor_distribution('w', [1.0], BAD)", 0),
    ("visualizer.plot_gradient_flow('f', [0, 1], BAD)", [1.0], "1 values"),
    ("visualizer.plot_gradient_flow('f', BAD, [1.0])", None),
    ("visualizer.plot_layer_heatmap('h', BAD, [0, 1], [[1.0, 2.0]])", None),
    ("visualizer.plot_layer_heatmap('h', BAD, [0, 1], [[1.0, 2.0]])", ["a", "b"], "2 names"),
    ("visualizer.plot_layer_heatmap(BAD, ['a'], [0], [[1.0]])", None),
    ("visualizer.plot_activation_heatmap('a', x, units=BAD)", 9),
    ("visualizer.create_dashboard(BAD)", ["typo"], "typo"),
    ("visualizer.create_dashboard(BAD)", 3),
    ("visualizer.get_plot(BAD)", None),
    ("visualizer.plot(BAD, 'x')", "histogramm"),
    ("TerminalVisualizer(width=BAD)", 0),
    ("TerminalVisualizer().ascii_histogram(BAD)", None),
    ("TerminalVisualizer().ascii_histogram([1.0], BAD)", "many"),
    ("TerminalVisualizer().ascii_line_plot([0, 1], BAD)", [1.0], "1 values"),
    ("TerminalVisualizer().ascii_line_plot(BAD, [1.0])", None),
    ("TerminalVisualizer().heatmap([[1.0]], BAD)", ["a", "b"], "2 names"),
    ("TerminalVisualizer().heatmap([[1.0]], BAD)", 3),
    ("TerminalVisualizer().layer_table(BAD)", None, "mapping"),
    ("TerminalVisualizer().layer_table({'a': {'mean': BAD}})", "x"),
    ("HookBuilder(BAD)", None),
    ("HookBuilder('a').trigger(BAD)", "every_forwrd"),
    ("HookBuilder('a').action(BAD)", None),
    ("HookBuilder('a').layer_patterns(BAD)", None),
    ("HookBuilder('a').layer_patterns(BAD)", [], "empty"),
    ("HookBuilder('a').max_executions(BAD)", 0),
    ("HookBuilder('a').callback(BAD)", None),
    ("HookBuilder('a').when(BAD)", "loss >"),
    ("HookBuilder('a').snapshot_to(BAD)", None),
    ("Hooks().register_hook(BAD)", None),
    ("Hooks().remove_hook(BAD)", "typo"),
    ("Hooks().attach(BAD)", None),
    ("Hooks().execute_hooks(BAD, x)", None),
    ("Hooks().execute_hooks('a', BAD)", None),
    ("Hooks().execute_hooks('a', x, BAD)", 3),
    ("Hooks().execute_hooks('a', x, None, True, BAD)", 3),
    ("Hooks().send_alerts_to(BAD)", None),
    ("Hooks().send_alerts_to(BAD)", "ftp://host"),
    ("Hooks().send_alerts_to('http://host', timeout_s=BAD)", "long"),
    ("Run(BAD)", "nothing"),
    ("Run(BAD)", 3),
    ("run.scalar(BAD)", "los"),
    ("run.series(BAD, '0.weight', 'l2')", "gradients"),
    ("run.series('gradient', BAD, 'l2')", "0.wieght"),
    ("run.events(BAD)", 3),
    ("diagnose(BAD)", "nothing"),
    ("diagnose(run, rules=BAD)", ["missing-zero-grad"]),
    ("compare(run, BAD)", None),
    ("compare(BAD, run)", "nothing"),
    ("profile_operations(BAD, loader)", None),
    ("profile_operations(model, BAD)", None),
]

PYTHON_ITSELF = re.compile(
    r"object is not|has no attribute|unhashable|not supported between|positional argument|unsupported operand|os\.PathLike|bytes-like"
)
# A message says what is wanted: by an example, a list of names, or a sentence of this kind.
SAYS_WHAT_TO_WRITE = re.compile(
    r"for instance|for example|such as|as in|one of|Nearest|There are|Did you mean|must |takes |needs? |measures|is a |are a |"
    r"go to|selected by|lists all|Use |Call |Name |Write |Start |Make |[Gg]ive |[Pp]ass "
)


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> Iterator[dict[str, Any]]:
    """What the calls use, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("wrong_input"))
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(5, 4)
        inspector, activations = sonde.TensorInspector(), sonde.ActivationVisualizer()
        inspector.inspect_tensor([1.0, 2.0], "loss")
        activations.register_forward_hook(model, "0")
        profile = sonde.Profiler().profile(model, x, warmup=0, repeats=1)
        with sonde.watch(model, optimizer) as earlier:
            for _ in range(3):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        with sonde.watch(model, optimizer) as session:
            public = {name: getattr(sonde, name) for name in sonde.__all__ if not name.startswith("_")}
            yield public | vars(SimpleNamespace(
                model=model, optimizer=optimizer, x=x, inspector=inspector, activations=activations, profile=profile, session=session,
                visualizer=sonde.DebugVisualizer(sonde.VisualizationConfig("plots")), run=sonde.Run(earlier.run), loader=[(x,)] * 4, np=np,
            ))  # fmt: skip


def _id(case: tuple[Any, ...]) -> str:
    shown = f"tensor of {list(case[1].shape)}" if isinstance(case[1], torch.Tensor) else repr(case[1])
    return case[0].replace("BAD", shown)


@pytest.mark.parametrize("case", [*FOUND_BY_USERS, *FURTHER], ids=_id)
def test_wrong_input_gets_a_sentence(case, names):
    code, given, *mention = case
    with pytest.raises((SondeError, TypeError, ValueError)) as raised:
        eval(code, {**names, "BAD": given})
    message = str(raised.value)
    mentions = mention or [repr(given), str(given), type(given).__name__]
    assert any(each in message for each in mentions if each) or repr(given) in message, message
    assert not PYTHON_ITSELF.search(message), message
    assert SAYS_WHAT_TO_WRITE.search(message), message
    assert re.search(r"[.?!:]( |\n|$)", message), message


def test_a_misspelled_name_of_the_package_has_a_suggestion():
    with pytest.raises(AttributeError) as raised:
        sonde.wach  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("wach", sonde)

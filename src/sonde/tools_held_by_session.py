"""The tools that a session holds. Each is created on first access, and from then on watches what the session watches: a session whose
tools nobody uses pays for none of them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

import sonde
from sonde.events import Kind

if TYPE_CHECKING:
    from sonde.memory_profiler.memory_profiler import MemoryProfiler
    from sonde.profiler.operation_report import OperationsReport
    from sonde.profiler.profiler import Profiler
    from sonde.session import DebugSession
    from sonde.tools.debug_visualizer import DebugVisualizer
    from sonde.tools.gradient_debugger import GradientDebugger
    from sonde.tools.hooks import Hooks
    from sonde.tools.model_diagnostics import ModelDiagnostics
    from sonde.tools.stability_checker import StabilityChecker
    from sonde.tools.tensor_inspector import TensorInspector
    from sonde.tools.weight_analyzer import WeightAnalyzer

PICTURES = "pictures"  # folders in the run's directory
OPERATIONS = "operations"
MAX_PLOTTED = 12  # parameters: a plot with more lines shows none of them

_log = logging.getLogger("sonde")


class SessionTools:
    """One tool of each kind for one session."""

    def __init__(self, session: DebugSession) -> None:
        self._session = session
        self._created: dict[str, Any] = {}
        self._attached: dict[tuple[str, int], weakref.ref[nn.Module]] = {}  # (tool, id of model): it watches this one already

    @property
    def tensor_inspector(self) -> TensorInspector:
        """Statistics, comparison and leaks of the tensors that you give it."""
        return cast(
            "TensorInspector", self._tool("tensor_inspector", lambda: sonde.TensorInspector(self._session.config.max_tracked_tensors))
        )

    @property
    def stability_checker(self) -> StabilityChecker:
        """How far numbers are from the edges of their type."""
        return cast("StabilityChecker", self._tool("stability_checker", sonde.StabilityChecker))

    @property
    def profiler(self) -> Profiler:
        """Times of your own code by name, and of a model layer by layer."""
        return cast("Profiler", self._tool("profiler", sonde.Profiler))

    @property
    def weight_analyzer(self) -> WeightAnalyzer:
        """Dead neurons, initialization and spectrum of weights."""
        return cast("WeightAnalyzer", self._tool("weight_analyzer", sonde.WeightAnalyzer))

    @property
    def gradient_debugger(self) -> GradientDebugger:
        """Health and trends of the gradients, of every step from the first time that it is asked for."""
        made = self._tool("gradient_debugger", lambda: sonde.GradientDebugger(self._session.config.max_gradient_history))
        tool = cast("GradientDebugger", made)
        for model, optimizer in self._new_models("gradient_debugger"):
            if any(p.requires_grad for p in model.parameters()):
                tool.register_hooks(model, optimizer)
        return tool

    @property
    def memory_profiler(self) -> MemoryProfiler:
        """What the memory is taken by: snapshots at once, everything from its `start()` on."""
        tool = cast("MemoryProfiler", self._tool("memory_profiler", sonde.MemoryProfiler))
        for model, optimizer in self._new_models("memory_profiler"):
            tool.attach(model, optimizer)
        return tool

    @property
    def model_diagnostics(self) -> ModelDiagnostics:
        """What the first model is, how its training goes, and a health score; read from the run when it is asked."""
        tool = cast("ModelDiagnostics", self._tool("model_diagnostics", lambda: sonde.ModelDiagnostics(lambda: self._session.run)))
        for model, _ in self._new_models("model_diagnostics"):
            if len([1 for name, _ in self._attached if name == "model_diagnostics"]) == 1:
                tool.inspect(model)
        return tool

    @property
    def hooks(self) -> Hooks:
        """Hooks of your own on the layers of the first model."""
        tool = cast("Hooks", self._tool("hooks", sonde.Hooks))
        if not any(name == "hooks" for name, _ in self._attached):
            for model, optimizer in self._new_models("hooks"):
                tool.attach(model, optimizer)
                break
        return tool

    @property
    def visualizer(self) -> DebugVisualizer:
        """Pictures, written beside the run."""

        def make() -> DebugVisualizer:
            directory = self._session.run
            return sonde.DebugVisualizer(sonde.VisualizationConfig(output_directory=str(directory / PICTURES)) if directory else None)

        return cast("DebugVisualizer", self._tool("visualizer", make))

    def profile_model_performance(
        self,
        loader: Iterable[Any],
        num_batches: int = 10,
        *,
        loss_fn: Callable[..., Tensor] | None = None,
        optimizer: Optimizer | None = None,
        output: str | Path | None = None,
    ) -> OperationsReport:
        """The first model under torch.profiler, on batches of a loader: operations by time with your lines, memory, FLOPs, and a trace in
        `output` (beside the run, where none is named). The model is left as it was unless an optimizer is given: then it trains."""
        model = next((model for model, _ in self._session.trained_models()), None)
        if model is None:
            raise sonde.SondeError(
                "this session watches no model yet, so there is none to profile.\n"
                "Start it with sonde.watch(model), or use sonde.profile_operations(model, loader)."
            )
        directory = self._session.run
        target = output if output is not None or directory is None else directory / OPERATIONS
        with self._session.pause():  # the profiler must not see what Sonde does
            return sonde.profile_operations(model, loader, num_batches, loss_fn=loss_fn, optimizer=optimizer, output=target)

    def draw_plots(self, run: Path, models: Mapping[str, nn.Module]) -> None:
        """Plots of a training beside its run, when it ends: gradient norms over the steps, the final weights, one page of both. An error
        here costs the plots and nothing else."""
        try:
            recorded = sonde.Run(run)
            names = [site.path for site in recorded.sites.values() if site.kind == "parameter" and site.trainable and not site.model]
            series = {name: recorded.series(Kind.GRADIENT, name, "l2") for name in names[:MAX_PLOTTED]}
            longest = max((len(steps) for steps, _ in series.values()), default=0)
            drawn = {name: values.tolist() for name, (steps, values) in series.items() if len(steps) == longest}
            if longest:
                steps = next(steps for steps, _ in series.values() if len(steps) == longest)
                self.visualizer.plot_gradient_flow("gradient norms", steps.tolist(), drawn)
            for name, model in models.items():
                weights = {path: p.detach() for path, p in model.named_parameters() if p.dim() > 1}
                for path, weight in list(weights.items())[:MAX_PLOTTED]:
                    self.visualizer.plot_weight_histogram(f"weights of {name + '.' if name else ''}{path}", weight)
            if self.visualizer.get_plot_names():
                self.visualizer.create_dashboard()
        except Exception as error:
            _log.warning("sonde: no plots could be drawn (%s: %s).", type(error).__name__, error)

    def on_log(self, values: dict[str, float]) -> None:
        """Conditions of hooks may use what the user logs."""
        if "hooks" in self._created:
            self._created["hooks"].log(**values)

    def close(self) -> None:
        """Remove every hook of the tools; what they have recorded stays."""
        self._attached.clear()
        for tool, leave in (("gradient_debugger", "remove"), ("hooks", "detach"), ("memory_profiler", "close")):
            if tool in self._created:
                getattr(self._created[tool], leave)()

    def _tool(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._created:
            self._created[name] = make()
        return self._created[name]

    def _new_models(self, tool: str) -> Iterator[tuple[nn.Module, Optimizer | None]]:
        for model, optimizer in self._session.trained_models():
            known = self._attached.get((tool, id(model)))
            if known is None or known() is not model:
                self._attached[tool, id(model)] = weakref.ref(model)
                yield model, optimizer

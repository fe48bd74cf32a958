"""The tools that a session holds. Each is created on first access, and from then on watches what the session watches; after the end of
the session it answers from the run."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from torch import nn
from torch.optim import Optimizer

import sonde
from sonde.events import Kind
from sonde.formatting import listing

if TYPE_CHECKING:
    from sonde.memory_profiler.memory_profiler import MemoryProfiler
    from sonde.profiler.profiler import Profiler
    from sonde.session import DebugSession
    from sonde.tools.debug_visualizer import DebugVisualizer
    from sonde.tools.gradient_debugger import GradientDebugger
    from sonde.tools.hooks import Hooks
    from sonde.tools.model_diagnostics import ModelDiagnostics
    from sonde.tools.stability_checker import StabilityChecker
    from sonde.tools.tensor_inspector import TensorInspector
    from sonde.tools.weight_analyzer import WeightAnalyzer

PICTURES = "pictures"  # folder in the run's directory

Tool = TypeVar("Tool")
_log = logging.getLogger("sonde")


class SessionTools:
    """One tool of each kind for one session."""

    def __init__(self, session: DebugSession) -> None:
        self._session = session
        self._created: dict[str, Any] = {}
        self._from_run: set[str] = set()  # tools that began with what the run has: no records of the user's
        self._cleared: set[str] = set()  # tools whose records the user has discarded: they stay empty
        self._attached: dict[tuple[str, int], weakref.ref[nn.Module]] = {}  # (tool, id of model): it watches this one already

    def tensor_inspector(self) -> TensorInspector:
        """Statistics, comparison and leaks of the tensors that you give it."""
        num = self._session.config.max_tracked_tensors
        return self._tool("tensor_inspector", lambda: sonde.TensorInspector(num), lambda run: sonde.TensorInspector.from_run(run, num))

    def stability_checker(self) -> StabilityChecker:
        """How far numbers are from the limits of their type."""
        return self._tool("stability_checker", sonde.StabilityChecker, sonde.StabilityChecker.from_run)

    def profiler(self) -> Profiler:
        """Times of your own code by name, and of a model layer by layer."""
        return self._tool("profiler", sonde.Profiler, sonde.Profiler.from_run)

    def weight_analyzer(self) -> WeightAnalyzer:
        """Dead neurons, initialization and spectrum of weights."""
        return self._tool("weight_analyzer", sonde.WeightAnalyzer)

    def gradient_debugger(self) -> GradientDebugger:
        """Health and trends of the gradients, of every step from the first access on; until then, of the observed steps."""
        history = self._session.config.max_gradient_history
        tool = self._tool("gradient_debugger", lambda: sonde.GradientDebugger(history, run=lambda: self._session.run))
        for model, optimizer in self._new_models("gradient_debugger"):
            if any(p.requires_grad for p in model.parameters()):
                tool.register_hooks(model, optimizer)
        return tool

    def memory_profiler(self) -> MemoryProfiler:
        """Memory by category: snapshots at once, everything from its `start()` on."""
        config = self._session.config
        tool = self._tool(
            "memory_profiler",
            lambda: sonde.MemoryProfiler(
                memory_threshold_mb=config.memory_threshold_mb, memory_threshold_share=config.memory_threshold_share
            ),
            sonde.MemoryProfiler.from_run,
        )
        for model, optimizer in self._new_models("memory_profiler"):
            tool.attach(model, optimizer)
        return tool

    def model_diagnostics(self) -> ModelDiagnostics:
        """The first model, how its training goes, and a health score; read from the run on access."""
        tool = self._tool("model_diagnostics", lambda: sonde.ModelDiagnostics(lambda: self._session.run))
        for model, _ in self._new_models("model_diagnostics", first_only=True):
            tool.inspect(model)
        return tool

    def hooks(self) -> Hooks:
        """Hooks of your own on the layers of the first model."""
        tool = self._tool("hooks", lambda: sonde.Hooks(read_loss=lambda: self._session.last_loss))
        for model, _ in self._new_models("hooks", first_only=True):
            tool.attach(model, self._session.optimizers_of(model))
        for model, _ in self._session.trained_models() if tool.needs_optimizer else ():  # it may have been made since
            optimizers = self._session.optimizers_of(model)
            if optimizers and ("hooks", id(model)) in self._attached:
                tool.attach(model, optimizers)
        return tool

    def visualizer(self) -> DebugVisualizer:
        """Plots, written beside the run."""
        run = self._session.run
        config = sonde.VisualizationConfig(output_directory=str(run / PICTURES)) if run is not None else None
        return self._tool("visualizer", lambda: sonde.DebugVisualizer(config))

    def draw_plots(self, run: Path, models: Mapping[str, nn.Module]) -> None:
        """Plots of a training beside its run, when it ends: gradient norms of all parameters over the steps, the final weights of each
        model, one page of both. An error here costs the plots and nothing else."""
        try:
            recorded = sonde.Run(run)
            names = [site.path for site in recorded.sites.values() if site.kind == "parameter" and site.trainable and not site.model]
            series = {name: recorded.series(Kind.GRADIENT, name, "l2") for name in names}
            longest = max((len(steps) for steps, _ in series.values()), default=0)
            drawn = {name: values.tolist() for name, (steps, values) in series.items() if len(steps) == longest}
            if longest:
                steps = next(steps for steps, _ in series.values() if len(steps) == longest)
                self.visualizer().plot_gradient_flow("gradient norms", steps.tolist(), drawn)
                if fewer := [name for name in series if name not in drawn]:
                    what = "the plot of gradient norms leaves out parameters that were measured in fewer steps"
                    _log.warning("sonde: %s, %d of %d: %s", what, len(fewer), len(series), listing(fewer))
            for name, model in models.items():
                self.visualizer().plot_weight_histogram(f"weights of {name}" if name else "weights", model)
            if self.visualizer().get_plot_names():
                self.visualizer().create_dashboard()
        except Exception as error:
            _log.warning("sonde: no plots could be drawn (%s: %s).", type(error).__name__, error)

    def attach_new_models(self) -> None:
        """Let the tools that were asked for watch the models that have been found since."""
        for name in ("gradient_debugger", "hooks", "memory_profiler", "model_diagnostics"):
            if name in self._created:
                getattr(self, name)()

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

    @property
    def has_any(self) -> bool:
        """Whether a tool was asked for."""
        return bool(self._created)

    def records(self) -> tuple[tuple[str, str], ...]:
        """The tools that hold records, in the order of their first use: name and one sentence each."""
        if not self._created:
            return ()
        from sonde.records_of_tools import describe_records

        found = []
        for name, tool in list(self._created.items()):
            try:
                if name not in self._from_run and (sentence := describe_records(name, tool)):
                    found.append((name, sentence))
            except Exception as error:
                _log.warning("sonde: the records of session.%s could not be described (%s: %s).", name, type(error).__name__, error)
        return tuple(found)

    def clear(self) -> None:
        """Discard the records of every tool. Registered hooks, attached models and plots on disk stay."""
        self._cleared.update(self._created)
        for tool in self._created.values():
            clear = getattr(tool, "clear", None)
            if clear is not None:
                clear()

    def _tool(self, name: str, make: Callable[[], Tool], from_run: Callable[[Path], Tool] | None = None) -> Tool:
        """The tool of that name. After the session has ended, one that was not used so far begins with what the run has."""
        run = self._session.run
        if from_run is not None and run is not None and not self._session.is_watching() and self._is_unused(name):
            self._created[name] = from_run(run)
            self._from_run.add(name)
        elif name not in self._created:
            self._created[name] = make()
        tool: Tool = self._created[name]
        return tool

    def _is_unused(self, name: str) -> bool:
        if name not in self._created:
            return True
        from sonde.records_of_tools import describe_records

        return name not in self._from_run and name not in self._cleared and not describe_records(name, self._created[name])

    def _new_models(self, tool: str, *, first_only: bool = False) -> Iterator[tuple[nn.Module, Optimizer | None]]:
        """The watched models that this tool does not know yet; with `first_only`, nothing once it knows one."""
        for model, optimizer in self._session.trained_models():
            if first_only and any(name == tool for name, _ in self._attached):
                return
            known = self._attached.get((tool, id(model)))
            if known is None or known() is not model:
                self._attached[tool, id(model)] = weakref.ref(model)
                yield model, optimizer


class SessionTool(Generic[Tool]):
    """A property of `DebugSession` that returns one of its tools."""

    def __init__(self, get: Callable[[SessionTools], Tool]) -> None:
        self._get, self.__doc__ = get, get.__doc__

    @overload
    def __get__(self, session: None, owner: type) -> Self: ...
    @overload
    def __get__(self, session: DebugSession, owner: type) -> Tool: ...
    def __get__(self, session: DebugSession | None, owner: type) -> Tool | Self:
        return self if session is None else self._get(session.tools)

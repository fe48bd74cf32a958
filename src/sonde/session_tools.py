"""The tools that a session holds. Each is made when it is first asked for, and from then on watches what the session watches: a session
that is asked for none of them pays for none.

They come by the public door, since the workbench is a room above this one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

import sonde
from sonde.config import DebugConfig

if TYPE_CHECKING:
    from pathlib import Path

    from sonde.memory_profiler.memory_profiler import MemoryProfiler
    from sonde.profiler.operation_report import OperationsReport
    from sonde.profiler.profiler import Profiler
    from sonde.tools.debug_visualizer import DebugVisualizer
    from sonde.tools.gradient_debugger import GradientDebugger
    from sonde.tools.hooks import Hooks
    from sonde.tools.model_diagnostics import ModelDiagnostics
    from sonde.tools.stability_checker import StabilityChecker
    from sonde.tools.tensor_inspector import TensorInspector
    from sonde.tools.weight_analyzer import WeightAnalyzer

PICTURES = "pictures"  # folders in the run's directory
OPERATIONS = "operations"


class Bench:
    """What `DebugSession` adds to watching: one tool of each kind, by name."""

    config: DebugConfig

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._joined: dict[tuple[str, int], weakref.ref[nn.Module]] = {}  # (tool, id of model): it watches this one already

    def _live(self) -> Iterator[tuple[nn.Module, Optimizer | None]]:
        """The models under watch, each with the optimizer that trains it, where there is exactly one."""
        raise NotImplementedError

    def _directory(self) -> Path | None:
        raise NotImplementedError

    def pause(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    @property
    def tensor_inspector(self) -> TensorInspector:
        """Statistics, comparison and leaks of the tensors that you give it."""
        return cast(
            "TensorInspector", self._tool("tensor_inspector", lambda: sonde.TensorInspector(self.config.max_tracked_tensors))
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
        """Dead neurons, initialisation and spectrum of weights."""
        return cast("WeightAnalyzer", self._tool("weight_analyzer", sonde.WeightAnalyzer))

    @property
    def gradient_debugger(self) -> GradientDebugger:
        """Health and trends of the gradients, of every step from the first time that it is asked for."""
        made = self._tool("gradient_debugger", lambda: sonde.GradientDebugger(self.config.max_gradient_history))
        tool = cast("GradientDebugger", made)
        for model, optimizer in self._newcomers("gradient_debugger"):
            if any(p.requires_grad for p in model.parameters()):
                tool.register_hooks(model, optimizer)
        return tool

    @property
    def memory_profiler(self) -> MemoryProfiler:
        """What the memory is taken by: snapshots at once, everything from its `start()` on."""
        tool = cast("MemoryProfiler", self._tool("memory_profiler", sonde.MemoryProfiler))
        for model, optimizer in self._newcomers("memory_profiler"):
            tool.attach(model, optimizer)
        return tool

    @property
    def model_diagnostics(self) -> ModelDiagnostics:
        """What the first model is, how its training goes, and a health score; read from the run when it is asked."""
        tool = cast("ModelDiagnostics", self._tool("model_diagnostics", lambda: sonde.ModelDiagnostics(self._directory)))
        for model, _ in self._newcomers("model_diagnostics"):
            if len([1 for joined, _ in self._joined if joined == "model_diagnostics"]) == 1:
                tool.inspect(model)
        return tool

    @property
    def hooks(self) -> Hooks:
        """Hooks of your own on the layers of the first model."""
        tool = cast("Hooks", self._tool("hooks", sonde.Hooks))
        if not any(joined == "hooks" for joined, _ in self._joined):
            for model, optimizer in self._newcomers("hooks"):
                tool.attach(model, optimizer)
                break
        return tool

    @property
    def visualizer(self) -> DebugVisualizer:
        """Pictures, written beside the run."""

        def make() -> DebugVisualizer:
            directory = self._directory()
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
        model = next((model for model, _ in self._live()), None)
        if model is None:
            raise sonde.SondeError(
                "this session watches no model yet, so there is none to profile.\n"
                "Start it with sonde.watch(model), or use sonde.profile_operations(model, loader)."
            )
        directory = self._directory()
        target = output if output is not None or directory is None else directory / OPERATIONS
        with self.pause():  # the profiler must not see what Sonde does
            return sonde.profile_operations(model, loader, num_batches, loss_fn=loss_fn, optimizer=optimizer, output=target)

    def _tell_hooks(self, values: dict[str, float]) -> None:
        """Conditions of hooks may ask for what the user logs."""
        if "hooks" in self._made:
            self._made["hooks"].log(**values)

    def clear_bench(self) -> None:
        """Takes off every hook of theirs; what the tools have recorded stays."""
        self._joined.clear()
        for name, leave in (("gradient_debugger", "remove"), ("hooks", "detach"), ("memory_profiler", "close")):
            if name in self._made:
                getattr(self._made[name], leave)()

    def _tool(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def _newcomers(self, tool: str) -> Iterator[tuple[nn.Module, Optimizer | None]]:
        for model, optimizer in self._live():
            known = self._joined.get((tool, id(model)))
            if known is None or known() is not model:
                self._joined[tool, id(model)] = weakref.ref(model)
                yield model, optimizer

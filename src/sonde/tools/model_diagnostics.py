"""ModelDiagnostics: what a model is, how its training goes, and how healthy that is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from torch import nn

from sonde.diagnostics.data import ModelArchitectureInfo, ModelPerformanceMetrics
from sonde.diagnostics.dynamics import Dynamics
from sonde.diagnostics.of_run import read_run
from sonde.diagnostics.report import DiagnosticsReport, diagnose
from sonde.errors import SondeError
from sonde.runlog.reader import Run
from sonde.tools.model_architecture import inspect_architecture


class ModelDiagnostics:
    """Takes steps by hand, or reads them from a run; `analyze()` says what they mean. Memory is bounded, however many steps there are.

    `run` is where a run is, asked each time that something is analysed: a session gives its own, so that nothing is recorded twice.
    """

    def __init__(self, run: Callable[[], Run | Path | str | None] | None = None) -> None:
        self._run = run
        self._architecture: ModelArchitectureInfo | None = None
        self._fold = Dynamics()

    @classmethod
    def from_run(cls, run: Run | Path | str) -> Self:
        """Of a run on disk, finished or not."""
        source = run if isinstance(run, Run) else Run(run)  # a wrong path is told here, not later
        return cls(lambda: source)

    def inspect(self, model: nn.Module, inputs: Any = None) -> ModelArchitectureInfo:
        """Parameters, layers, depth and receptive field of a model. With `inputs` (a batch) one forward pass is followed, in eval mode;
        the model, its buffers and the random state are then as before."""
        return self.record_architecture(inspect_architecture(model, inputs))

    def record_architecture(self, architecture: ModelArchitectureInfo) -> ModelArchitectureInfo:
        """What you know of the model yourself."""
        if not isinstance(architecture, ModelArchitectureInfo):
            raise SondeError(
                f"record_architecture takes a ModelArchitectureInfo, not a {type(architecture).__name__}.\n"
                "For a model there is inspect(model)."
            )
        self._architecture = architecture
        return architecture

    def record_performance(self, metrics: ModelPerformanceMetrics) -> None:
        """One step of the training."""
        if not isinstance(metrics, ModelPerformanceMetrics):
            raise SondeError(
                f"record_performance takes ModelPerformanceMetrics, not a {type(metrics).__name__}:\n"
                "    diagnostics.record_performance(ModelPerformanceMetrics(training_step=step, loss=loss.item()))"
            )
        self._fold.see(metrics)

    def analyze(self, *, ahead: int | None = None) -> DiagnosticsReport:
        """What all of it means. `ahead`: how many steps after the last one the loss is forecast; without it, half of what was seen.

        Where steps were recorded by hand they count, and not those of the run; the findings are always the run's.
        """
        if ahead is not None and (isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1):
            raise SondeError(f"ahead is a number of steps from 1 on, not {ahead!r}.")
        source = self._run() if self._run is not None else None
        if source is None:
            return diagnose(self._fold, self._architecture, None, ahead=ahead)
        fold, architecture, findings = read_run(source)
        return diagnose(fold if not self._fold.loss.num else self._fold, self._architecture or architecture, findings, ahead=ahead)

    report = analyze

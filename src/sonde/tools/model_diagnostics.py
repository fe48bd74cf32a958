"""ModelDiagnostics: architecture, training dynamics and a health score of a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from torch import nn

from sonde.diagnostics.diagnostics_report import DiagnosticsReport, build_diagnostics_report
from sonde.diagnostics.load_run_for_diagnostics import read_run
from sonde.diagnostics.training_history import MetricsRecorder
from sonde.diagnostics.user_supplied_metrics import ModelArchitectureInfo, ModelPerformanceMetrics
from sonde.errors import SondeError, require_count, require_function
from sonde.runlog.run_reader import Run
from sonde.tools.model_architecture import inspect_architecture

EXAMPLE = "diagnostics.record_performance(ModelPerformanceMetrics(training_step=step, loss=loss.item()))"


class ModelDiagnostics:
    """Collects training steps from calls or from a run log, and analyzes them in bounded memory. `run` is a function that returns the run
    to read; it is called at every analysis. A session passes its own run."""

    def __init__(self, run: Callable[[], Run | Path | str | None] | None = None) -> None:
        if run is not None:
            require_function(run, "run", "lambda: session.run (for a path use ModelDiagnostics.from_run)")
        self._run = run
        self._architecture: ModelArchitectureInfo | None = None
        self._recorder = MetricsRecorder()

    @classmethod
    def from_run(cls, run: Run | Path | str) -> Self:
        """Diagnostics of a run on disk, finished or not."""
        source = run if isinstance(run, Run) else Run(run)  # a wrong path raises here, not later
        return cls(lambda: source)

    def inspect(self, model: nn.Module, inputs: Any = None) -> ModelArchitectureInfo:
        """Reads parameters, layers, depth and receptive field of a model. With `inputs` (a batch) one forward pass runs in eval mode;
        the model, its buffers and the random state are unchanged afterwards."""
        return self.record_architecture(inspect_architecture(model, inputs))

    def record_architecture(self, architecture: ModelArchitectureInfo) -> ModelArchitectureInfo:
        """Sets the architecture from your own values."""
        if not isinstance(architecture, ModelArchitectureInfo):
            raise SondeError(f"record_architecture needs a ModelArchitectureInfo, not {type(architecture).__name__}.\nUse inspect(model).")
        self._architecture = architecture
        return architecture

    def record_performance(self, metrics: ModelPerformanceMetrics) -> None:
        """Records one training step."""
        if not isinstance(metrics, ModelPerformanceMetrics):
            raise SondeError(f"record_performance takes ModelPerformanceMetrics, not a {type(metrics).__name__}:\n    {EXAMPLE}")
        self._recorder.add(metrics)

    def analyze(self, *, ahead: int | None = None) -> DiagnosticsReport:
        """Builds the report. `ahead` is the number of steps for the loss forecast; by default half of the recorded steps. Steps from
        `record_performance` take precedence over those of the run; findings always come from the run."""
        if ahead is not None:
            require_count(ahead, "ahead")
        source = self._run() if self._run is not None else None
        if source is None:
            return build_diagnostics_report(self._recorder.columns(), self._architecture, None, ahead=ahead)
        columns, architecture, results = read_run(source)
        if self._recorder.num_steps:
            columns = self._recorder.columns()
        return build_diagnostics_report(columns, self._architecture or architecture, results, ahead=ahead)

    report = analyze

    @property
    def health_score(self) -> float | None:
        """The score of `analyze()`, 0 to 100; None if nothing could be evaluated."""
        return self.analyze().health_score

    @property
    def num_recorded(self) -> int:
        """The number of steps passed to `record_performance`."""
        return self._recorder.num_steps

    def clear(self) -> None:
        """Discard the recorded steps and the architecture; a run that is read stays as it is."""
        self._recorder = MetricsRecorder()
        self._architecture = None

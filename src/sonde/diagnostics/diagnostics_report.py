"""DiagnosticsReport: the model, the training, the health score with its parts, and recommendations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sonde.diagnostics.health_score import Health, RuleResults, health_of
from sonde.diagnostics.training_dynamics import TrainingDynamics, training_dynamics
from sonde.diagnostics.training_history import TrainingColumns
from sonde.diagnostics.user_supplied_metrics import ModelArchitectureInfo
from sonde.events import Finding
from sonde.formatting import listing, number, strict_json

if TYPE_CHECKING:
    from sonde.render.plots import Plot

IDLE = 0.5  # of the time: a GPU that is busier is not the first problem
NEAR = 2  # steps between a spike and a rise that are the same
LONG = 3.0  # half-lives until seven eighths of what is left are gained


@dataclass(frozen=True, slots=True)
class DiagnosticsReport:
    """The diagnostics of a training. Parts that are not known are None, or say why."""

    architecture: ModelArchitectureInfo | None
    dynamics: TrainingDynamics
    health: Health
    findings: tuple[Finding, ...]
    recommendations: tuple[str, ...]
    losses: tuple[tuple[int, float], ...]  # step and value, for pictures; values that are not finite included
    validation_losses: tuple[tuple[int, float], ...] = ()

    @property
    def health_score(self) -> float | None:
        """0 to 100; None if nothing could be evaluated."""
        return self.health.score

    @property
    def parameter_efficiency(self) -> float | None:
        """Share of the first loss that was removed, per million trainable parameters."""
        removed, trainable = self.dynamics.efficiency.removed_share, self.architecture and self.architecture.trainable_parameters
        return removed / (trainable / 1e6) if removed is not None and trainable else None

    @property
    def samples_per_parameter(self) -> float | None:
        """Samples seen for each trainable parameter."""
        samples, trainable = self.dynamics.efficiency.num_samples, self.architecture and self.architecture.trainable_parameters
        return samples / trainable if samples and trainable else None

    def summary(self) -> str:
        """As text for a terminal."""
        from sonde.render.summaries.diagnostics_summary import diagnostics_text

        return diagnostics_text(self)

    __str__ = summary

    def _repr_html_(self) -> str:
        from sonde.render.summaries.diagnostics_summary import diagnostics_html

        return diagnostics_html(self)

    def to_json(self) -> str:
        """One strict JSON document; a number that is not finite is the string "NaN", "Infinity" or "-Infinity"."""
        document = {
            "health": asdict(self.health), "architecture": None if self.architecture is None else asdict(self.architecture),
            "parameter_efficiency": self.parameter_efficiency, "samples_per_parameter": self.samples_per_parameter,
            "dynamics": asdict(self.dynamics), "findings": [asdict(finding) for finding in self.findings],
            "recommendations": list(self.recommendations),
        }  # fmt: skip
        return strict_json(document)

    def plot(self, path: str | Path | None = None) -> Plot:
        """Losses with the forecast, and the parts of the score; written to `path` if there is one (.png, .svg, .pdf, .html, .json)."""
        from sonde.render.plots.diagnostics_plot import diagnostics_plot

        plot = diagnostics_plot(self)
        if path is not None:
            plot.save(path)
        return plot


def build_diagnostics_report(
    columns: TrainingColumns, architecture: ModelArchitectureInfo | None, results: RuleResults | None, *, ahead: int | None = None
) -> DiagnosticsReport:
    """`results`: of the rules; None if no run was judged. `ahead`: number of steps for the forecast of the loss."""
    dynamics = training_dynamics(columns, ahead)
    health, known = health_of(dynamics, columns, results), results.findings if results is not None else ()
    lines = tuple(_recommendations(dynamics, columns, architecture, known))
    return DiagnosticsReport(architecture, dynamics, health, known, lines, columns.loss.points(), columns.validation.points())


def _recommendations(
    dynamics: TrainingDynamics, columns: TrainingColumns, architecture: ModelArchitectureInfo | None, findings: Sequence[Finding]
) -> list[str]:
    """The findings of rules come first, then what follows from the curve; empty if nothing is to be done."""
    lines = [f"{one.rule}: {one.fix}" for one in findings if "consequence_of" not in one.evidence and one.severity.rank]
    is_explained = bool(lines)  # the cause is known: general advice about the same loss would only distract
    found, overfitting = dynamics.convergence, dynamics.overfitting
    if dynamics.learning == "not finite" and not is_explained:
        lines.append("run one step under sonde.find_origin(model): it names the operation that makes the NaN or Inf")
    elif dynamics.learning == "diverging" and not is_explained:
        lines.append(_after_divergence(dynamics, columns.trend.risen_step))
    elif dynamics.learning == "not learning" and not is_explained:
        lines.append("train on one batch until the loss is near zero: if that fails the loop is wrong, if it works raise the learning rate")
    elif dynamics.learning == "settled" and dynamics.plateau is not None and overfitting.is_overfitting is not True:
        lines.append(f"the loss gains nothing since step {dynamics.plateau.since_step}: stop, or lower the learning rate once more")
    elif (
        dynamics.learning == "improving" and found is not None and found.half_life_steps is not None and not overfitting.is_overfitting
        and dynamics.accuracy_fall is None
    ):  # fmt: skip
        lines.append(f"continue the training: about {number(LONG * found.half_life_steps)} more steps bring most of what is left to gain")
    if overfitting.is_overfitting:
        lines.append(f"keep the weights of step {overfitting.best_step}, where validation was best; regularize, or stop earlier")
    if (fall := dynamics.accuracy_fall) is not None:
        lines.append(
            f"accuracy was {number(fall.best)} until about step {fall.best_step} and is {number(fall.last)} now: keep the weights of that "
            "step, and find what changed since: the learning rate, the data or its order, train() and eval()"
        )
    if (fall := dynamics.throughput_fall) is not None:
        lines.append(
            f"throughput fell from {number(fall.best)} to {number(fall.last)} samples per second since step {fall.best_step}: "
            "sonde profile shows where the time goes; growing memory, longer batches and data loading are usual reasons"
        )
    spikes = [str(one.step) for one in dynamics.anomalies if one.kind == "loss spike"]
    if spikes and not is_explained and dynamics.learning != "diverging":
        lines.append(f"the loss jumped at step {listing(spikes)}: clip gradients, and inspect these batches")
    if len(columns.gpu_utilization) and float(np.median(columns.gpu_utilization)) < IDLE:
        lines.append("the GPU waits most of the time: sonde profile shows whether data loading or small batches are the reason")
    if any(one.kind == "memory growth" for one in dynamics.anomalies) and (columns.is_recorded_by_hand or not is_explained):
        lines.append("memory grows with every step: sonde.MemoryProfiler shows what holds it")
    if architecture is not None and architecture.trainable_parameters == 0:
        lines.append("no parameter is trainable: call requires_grad_(True) on those that should learn")
    return lines


def _after_divergence(dynamics: TrainingDynamics, risen_step: int) -> str:
    """A loss that jumps and stays high had a bad batch; one that rises slowly has too large a learning rate."""
    jumps = [one.step for one in dynamics.anomalies if one.kind == "loss spike" and abs(one.step - risen_step) <= NEAR]
    if jumps:
        return f"the loss jumped at step {jumps[0]} and stayed high: inspect that batch, clip gradients, go on from the weights before it"
    return "lower the learning rate by a factor of three to ten, or clip gradients: the loss rises"

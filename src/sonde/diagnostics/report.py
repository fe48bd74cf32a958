"""What diagnostics say in the end: the model, the training, the health score with its parts, and what to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.diagnostics.data import MILLION, ModelArchitectureInfo
from sonde.diagnostics.dynamics import Dynamics, TrainingDynamics
from sonde.diagnostics.health import Health, health_of
from sonde.events import Finding
from sonde.report import strict
from sonde.rules.words import listing, number

if TYPE_CHECKING:
    from sonde.views.plots import Plot

IDLE = 0.5  # of the time: a GPU that is busier is not what to look at first
NEAR = 2  # steps between a leap and a rise that are one
LONG = 3.0  # half-lives until seven eighths of what is left are gained


@dataclass(frozen=True, slots=True)
class DiagnosticsReport:
    """Everything that could be told. Parts that could not are None, or say why."""

    architecture: ModelArchitectureInfo | None
    dynamics: TrainingDynamics
    health: Health
    findings: tuple[Finding, ...]
    recommendations: tuple[str, ...]
    losses: tuple[tuple[int, float], ...]  # step and value, for pictures; what is not finite is kept
    validation_losses: tuple[tuple[int, float], ...] = ()

    @property
    def health_score(self) -> float | None:
        """0 to 100; None where nothing could be evaluated."""
        return self.health.score

    @property
    def parameter_efficiency(self) -> float | None:
        """Share of the first loss that was removed, per million trainable parameters."""
        removed = self.dynamics.efficiency.removed_share
        trainable = self.architecture.trainable_parameters if self.architecture else None
        return removed / (trainable / MILLION) if removed is not None and trainable else None

    @property
    def samples_per_parameter(self) -> float | None:
        """Samples seen for each trainable parameter."""
        samples = self.dynamics.efficiency.num_samples
        trainable = self.architecture.trainable_parameters if self.architecture else None
        return samples / trainable if samples and trainable else None

    def summary(self) -> str:
        """For people, in a terminal."""
        from sonde.views.diagnostics import diagnostics_text

        return diagnostics_text(self)

    __str__ = summary

    def _repr_html_(self) -> str:
        from sonde.views.diagnostics import diagnostics_html

        return diagnostics_html(self)

    def to_json(self) -> str:
        """One strict JSON document; what is not finite is the string "NaN", "Infinity" or "-Infinity"."""
        document = {
            "health": asdict(self.health),
            "architecture": None if self.architecture is None else asdict(self.architecture),
            "parameter_efficiency": self.parameter_efficiency,
            "samples_per_parameter": self.samples_per_parameter,
            "dynamics": asdict(self.dynamics),
            "findings": [asdict(finding) for finding in self.findings],
            "recommendations": list(self.recommendations),
        }
        return json.dumps(strict(document), indent=1, allow_nan=False)

    def plot(self, path: str | Path | None = None) -> Plot:
        """Losses with the forecast, and the parts of the score; written where a path is given (.png, .svg, .pdf, .html, .json)."""
        from sonde.views.plots.diagnostics import diagnostics_plot

        plot = diagnostics_plot(self)
        if path is not None:
            plot.save(path)
        return plot


def diagnose(
    fold: Dynamics, architecture: ModelArchitectureInfo | None, findings: Sequence[Finding] | None, *, ahead: int | None = None
) -> DiagnosticsReport:
    """The report on what was seen so far. `findings` are None where no run was judged."""
    dynamics = fold.result(ahead)
    return DiagnosticsReport(
        architecture,
        dynamics,
        health_of(dynamics, fold, findings),
        tuple(findings or ()),
        tuple(_advice(dynamics, fold, architecture, findings or ())),
        tuple(zip(fold.loss.steps, fold.loss.values)),
        tuple(zip(fold.validation.steps, fold.validation.values)),
    )


def _advice(
    dynamics: TrainingDynamics, fold: Dynamics, architecture: ModelArchitectureInfo | None, findings: Sequence[Finding]
) -> list[str]:
    """What rules have proved comes first, then what follows from the curve; nothing where nothing is to be done."""
    lines = [f"{one.rule}: {one.fix}" for one in findings if "consequence_of" not in one.evidence and one.severity.rank]
    proved = bool(lines)  # the cause is known: general advice about the same loss would only distract
    found, overfitting = dynamics.convergence, dynamics.overfitting
    if dynamics.learning == "not finite" and not proved:
        lines.append("run one step under sonde.find_origin(model): it names the operation that makes the NaN or Inf")
    elif dynamics.learning == "diverging" and not proved:
        lines.append(_of_divergence(dynamics, fold.learning.risen_step))
    elif dynamics.learning == "not learning" and not proved:
        lines.append("try to learn a single batch by heart: if that fails the loop is wrong, if it works raise the learning rate")
    elif dynamics.learning == "settled" and dynamics.plateau is not None and overfitting.is_overfitting is not True:
        lines.append(
            f"the loss gains nothing since step {dynamics.plateau.since_step}: stop, or lower the learning rate once more and look"
        )
    elif dynamics.learning == "improving" and found is not None and found.half_life_steps is not None and not overfitting.is_overfitting:
        lines.append(f"train on: about {number(LONG * found.half_life_steps)} more steps bring most of what is left to gain")
    if overfitting.is_overfitting:
        lines.append(f"keep the weights of step {overfitting.best_step}, where validation was best; regularise, or stop earlier")
    spikes = [str(one.step) for one in dynamics.anomalies if one.kind == "loss spike"]
    if spikes and not proved and dynamics.learning != "diverging":
        lines.append(f"the loss leapt at step {listing(spikes)}: clip gradients, and look at what was in these batches")
    _, busy = fold.gpu.finite()
    if len(busy) and float(sorted(busy)[len(busy) // 2]) < IDLE:
        lines.append("the GPU waits most of the time: see with sonde profile whether data loading or small batches hold it up")
    if any(one.kind == "memory growth" for one in dynamics.anomalies) and not proved:
        lines.append("memory grows with every step: sonde.MemoryProfiler names who holds it")
    if architecture is not None and architecture.trainable_parameters == 0:
        lines.append("no parameter is trainable: thaw those that should learn with requires_grad_(True)")
    return lines


def _of_divergence(dynamics: TrainingDynamics, risen_step: int) -> str:
    """A loss that leaps and does not come back had a bad batch, or met a wall; one that climbs has too large a learning rate."""
    leapt = [one.step for one in dynamics.anomalies if one.kind == "loss spike" and abs(one.step - risen_step) <= NEAR]
    if leapt:
        return f"the loss leapt at step {leapt[0]} and did not come back: look at that batch, clip gradients, go on from weights before it"
    return "lower the learning rate by a factor of three to ten, or clip gradients: the loss rises"

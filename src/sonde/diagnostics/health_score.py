"""Health score of a training, from 0 to 100, with its parts. The weight of a part about which nothing is known goes to the others. A
finding of a rule limits the score, whatever the other parts are: a good loss means nothing if the wrong thing is trained."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sonde.diagnostics.training_dynamics import TrainingDynamics
from sonde.diagnostics.training_history import TrainingColumns
from sonde.events import Finding, Severity
from sonde.formatting import counted, listing, number
from sonde.rules.registry import SPEED_RULES

WEIGHTS = {
    "learning": 35,  # what a training is for
    "findings": 30,  # what rules found, with evidence
    "stability": 15,
    "generalisation": 15,  # often not measured, and corrected without a new run
    "efficiency": 5,  # a slow training is not a broken one
}
WASTEFUL = 0.3  # share for a training with a finding about speed
LEARNING_SHARES = {"improving": 1.0, "settled": 0.9, "not learning": 0.15, "diverging": 0.0, "not finite": 0.0}
HALF = 0.5  # of the first loss: a training that removed that much has the full share for learning
CEILINGS = {Severity.CRITICAL: 30.0, Severity.ERROR: 60.0, Severity.WARNING: 85.0}
NOT_FINITE = 10.0  # such a training learns nothing any more
SHARES = {Severity.CRITICAL: 0.0, Severity.ERROR: 0.25, Severity.WARNING: 0.6, Severity.INFO: 1.0}
FURTHER = 0.1  # for each further finding that is a cause of its own
SPIKE, MOST_SPIKES = 0.1, 0.4
NOISE_GROWTH = 3.0  # times: by less than that, the noise of a loss has not grown
STEADY = 0.5  # the slowest tenth of the steps reaches that share of the usual throughput in a steady training


@dataclass(frozen=True, slots=True)
class HealthPart:
    """One part: 0 to 1, or None if it was not evaluated."""

    name: str
    share: float | None
    weight: int
    why: str

    @property
    def points(self) -> str:
        return "not evaluated" if self.share is None else f"{self.share * self.weight:.1f} of {self.weight}"


@dataclass(frozen=True, slots=True)
class Health:
    """The score and its parts. `score` is None if nothing could be evaluated."""

    score: float | None
    parts: tuple[HealthPart, ...]
    ceiling: float = 100.0
    ceiling_why: str = ""  # what sets it; empty if the parts alone decide

    def __str__(self) -> str:
        return "could not tell" if self.score is None else f"{self.score:.0f} of 100"


def health_of(dynamics: TrainingDynamics, columns: TrainingColumns, findings: Sequence[Finding] | None) -> Health:
    """`findings`: of the rules; None if there is no run that they could judge."""
    slow = [each for each in findings or () if each.rule in SPEED_RULES]
    findings = None if findings is None else [each for each in findings if each.rule not in SPEED_RULES]
    efficiency = _efficiency(dynamics, columns, slow)
    parts = (_learning(dynamics), _findings(findings), _stability(dynamics), _generalisation(dynamics), efficiency)
    judged = [part for part in parts if part.share is not None]
    total = sum(part.weight for part in judged)
    # A finding is a verdict by itself. That nothing was found is none, unless the steps were evaluated too.
    is_broken = any(finding.severity in CEILINGS for finding in findings or ())
    names = {part.name for part in judged}
    if not is_broken and "learning" not in names and not {"findings", "stability"} <= names:
        return Health(None, parts)
    score = 100 * sum(part.weight * (part.share or 0.0) for part in judged) / total
    ceiling, why = _ceiling(dynamics, findings)
    return Health(min(score, ceiling), parts, ceiling, why if score > ceiling else "")


def _ceiling(dynamics: TrainingDynamics, findings: Sequence[Finding] | None) -> tuple[float, str]:
    if dynamics.learning == "not finite":
        return NOT_FINITE, f"at most {NOT_FINITE:g}: {dynamics.why}"
    worst = max(findings or (), key=lambda one: one.severity.rank, default=None)
    if worst is None or worst.severity not in CEILINGS:
        return 100.0, ""
    return CEILINGS[worst.severity], f"at most {CEILINGS[worst.severity]:g} with a finding that is {worst.severity} ({worst.rule})"


def _part(name: str, share: float | None, why: str) -> HealthPart:
    return HealthPart(name, share, WEIGHTS[name], why)


def _learning(dynamics: TrainingDynamics) -> HealthPart:
    share = LEARNING_SHARES.get(dynamics.learning)
    if dynamics.learning == "improving":
        removed = dynamics.efficiency.removed_share
        # A loss that began lower, before a second task, has no share of it removed, although the training learns.
        share = 0.85 if removed is None or removed <= 0 else 0.7 + 0.3 * min(1.0, removed / HALF)
    return _part("learning", share, f"{dynamics.learning}: {dynamics.why}")


def _findings(findings: Sequence[Finding] | None) -> HealthPart:
    if findings is None:
        return _part("findings", None, "there is no run that the rules could judge")
    causes = [one for one in findings if "consequence_of" not in one.evidence and one.severity is not Severity.INFO]
    if not causes:
        return _part("findings", 1.0, "the rules found nothing wrong")
    worst = min(SHARES[one.severity] for one in causes)
    rules = listing([f"{one.rule} ({one.severity})" for one in causes])
    return _part("findings", max(0.0, worst - FURTHER * (len(causes) - 1)), rules)


def _stability(dynamics: TrainingDynamics) -> HealthPart:
    found = dynamics.stability
    if not dynamics.num_steps or (found.noise_share is None and not found.num_nonfinite):
        return _part("stability", None, "too few losses")
    share, why = 1.0, []
    if found.num_nonfinite:
        share -= 0.5 + 0.5 * min(1.0, found.num_nonfinite / dynamics.num_steps)
        why.append(f"{found.num_nonfinite} losses not finite")
    if found.num_spikes:
        share -= min(MOST_SPIKES, SPIKE * found.num_spikes)
        why.append(counted(found.num_spikes, "spike"))
    if (growth := found.noise_growth or 0.0) > NOISE_GROWTH and dynamics.learning != "settled":
        share -= 0.2
        why.append(f"its noise grew {number(growth)} times")
    if not why:
        why.append(f"it scatters by {number(100 * (found.noise_share or 0.0))} % around its trend, without spikes")
    return _part("stability", max(0.0, share), ", ".join(why))


def _generalisation(dynamics: TrainingDynamics) -> HealthPart:
    found = dynamics.overfitting
    if dynamics.learning in ("not finite", "diverging", "not learning"):
        return _part("generalisation", None, "validation means nothing while the training itself fails")
    if found.is_overfitting is None:
        return _part("generalisation", None, found.reason)
    return _part("generalisation", max(0.0, 0.6 - found.lost_share) if found.is_overfitting else 1.0, found.reason)


def _efficiency(dynamics: TrainingDynamics, columns: TrainingColumns, slow: Sequence[Finding]) -> HealthPart:
    shares, why = [], []
    if slow:
        shares.append(WASTEFUL)
        why.append(listing([one.rule for one in slow]))
    if len(columns.throughput) >= 10:
        slowest = float(np.quantile(columns.throughput, 0.1) / max(np.median(columns.throughput), 1e-30))
        shares.append(min(1.0, slowest / STEADY))
        why.append(f"one step in ten has {number(100 * slowest)} % of the usual throughput or less")
    if len(columns.gpu_utilization):
        shares.append(float(np.median(columns.gpu_utilization)))
        why.append(f"the GPU is busy {number(100 * shares[-1])} % of the time")
    if any(one.kind == "memory growth" for one in dynamics.anomalies):
        shares.append(0.0)
        why.append("memory grows steadily")
    if not shares:
        return _part("efficiency", None, "neither throughput nor GPU utilization was recorded")
    return _part("efficiency", min(shares), ", ".join(why))

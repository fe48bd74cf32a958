"""Health score of a training, from 0 to 100, with its parts. The weight of a part about which nothing is known goes to the others. A
finding of a rule limits the score, whatever the other parts are: a good loss means nothing if the wrong thing is trained."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sonde.diagnostics.training_dynamics import TrainingDynamics
from sonde.diagnostics.training_history import TrainingColumns
from sonde.events import Finding, Severity
from sonde.formatting import counted, listing, number, percent
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
FURTHER_DEFECT = 10.0  # points by which each further defect lowers the limit that the worst one sets
SPIKE, MOST_SPIKES = 0.1, 0.4
NOISE_GROWTH = 3.0  # times: by less than that, the noise of a loss has not grown
STEADY = 0.5  # the slowest tenth of the steps reaches that share of the usual throughput in a steady training


@dataclass(frozen=True, slots=True)
class RuleResults:
    """What the rules say about a run."""

    findings: tuple[Finding, ...] = ()
    clear: tuple[str, ...] = ()  # rules that found nothing
    not_evaluated: tuple[str, ...] = ()

    def without_speed(self) -> "RuleResults":
        findings = tuple(each for each in self.findings if each.rule not in SPEED_RULES)
        clear, not_evaluated = (tuple(name for name in names if name not in SPEED_RULES) for names in (self.clear, self.not_evaluated))
        return RuleResults(findings, clear, not_evaluated)

    @property
    def num_evaluated(self) -> int:
        return len(self.clear) + len({finding.rule for finding in self.findings})


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


def health_of(dynamics: TrainingDynamics, columns: TrainingColumns, results: RuleResults | None) -> Health:
    """`results`: of the rules; None if there is no run that they could judge."""
    slow = [each for each in results.findings if each.rule in SPEED_RULES] if results is not None else []
    results = None if results is None else results.without_speed()
    findings = () if results is None else results.findings
    efficiency = _efficiency(dynamics, columns, slow)
    parts = (_learning(dynamics), _findings(results), _stability(dynamics), _generalisation(dynamics), efficiency)
    judged = [part for part in parts if part.share is not None]
    total = sum(part.weight for part in judged)
    # A finding is a verdict by itself. That nothing was found is none, unless the steps were evaluated too.
    is_broken = any(finding.severity in CEILINGS for finding in findings)
    names = {part.name for part in judged}
    if not is_broken and "learning" not in names and not {"findings", "stability"} <= names:
        return Health(None, parts)
    score = 100 * sum(part.weight * (part.share or 0.0) for part in judged) / total
    ceiling, why = _ceiling(dynamics, columns, findings)
    return Health(min(score, ceiling), parts, ceiling, why if score > ceiling else "")


def _ceiling(dynamics: TrainingDynamics, columns: TrainingColumns, findings: Sequence[Finding]) -> tuple[float, str]:
    if dynamics.learning == "not finite":
        return NOT_FINITE, f"at most {NOT_FINITE:g}: {dynamics.why}"
    worst = max(findings, key=lambda one: one.severity.rank, default=None)
    limits = [(limit, why) for severity, why in _defects(dynamics, columns) if (limit := CEILINGS[severity])]
    if worst is not None and worst.severity in CEILINGS:
        limits.append((CEILINGS[worst.severity], f"a finding that is {worst.severity} ({worst.rule})"))
    if not limits:
        return 100.0, ""
    ceiling = max(0.0, min(limit for limit, _ in limits) - FURTHER_DEFECT * (len(limits) - 1))
    return ceiling, f"at most {ceiling:g} with {' and '.join(why for _, why in sorted(limits))}"


def _defects(dynamics: TrainingDynamics, columns: TrainingColumns) -> Iterator[tuple[Severity, str]]:
    """What no rule judges: the accuracy, and numbers that were recorded by hand."""
    if (fall := dynamics.accuracy_fall) is not None:
        yield Severity.ERROR, f"an accuracy that fell from {number(fall.best)} to {number(fall.last)}"
    if (fall := dynamics.throughput_fall) is not None:
        yield Severity.WARNING, f"a throughput that fell by {percent(fall.lost_share)}"
    if columns.is_recorded_by_hand and any(one.kind == "memory growth" for one in dynamics.anomalies):
        yield Severity.WARNING, "memory that grows steadily"


def _part(name: str, share: float | None, why: str) -> HealthPart:
    return HealthPart(name, share, WEIGHTS[name], why)


def _learning(dynamics: TrainingDynamics) -> HealthPart:
    share = LEARNING_SHARES.get(dynamics.learning)
    if dynamics.learning == "improving":
        removed = dynamics.efficiency.removed_share
        # A loss that began lower, before a second task, has no share of it removed, although the training learns.
        share = 0.85 if removed is None or removed <= 0 else 0.7 + 0.3 * min(1.0, removed / HALF)
    why = f"{dynamics.learning}: {dynamics.why}"
    if (fall := dynamics.accuracy_fall) is not None and share is not None:
        share *= 1 - fall.lost_share
        why += f"; but accuracy fell from {number(fall.best)} to {number(fall.last)}"
    return _part("learning", share, why)


def _findings(results: RuleResults | None) -> HealthPart:
    """A rule that could not be evaluated neither gives points nor costs any: its part of the weight goes to the other parts."""
    if results is None:
        return _part("findings", None, "there is no run that the rules could judge")
    num, missing = results.num_evaluated, len(results.not_evaluated)
    if not num:
        return _part("findings", None, f"none of {counted(missing, 'rule')} could be evaluated")
    causes = [one for one in results.findings if "consequence_of" not in one.evidence and one.severity is not Severity.INFO]
    share = max(0.0, min(SHARES[one.severity] for one in causes) - FURTHER * (len(causes) - 1)) if causes else 1.0
    why = listing([f"{one.rule} ({one.severity})" for one in causes]) or f"{counted(num, 'rule')} found nothing wrong"
    if missing:
        why += f"; {missing} could not be evaluated and {'gives' if missing == 1 else 'give'} no points"
    return HealthPart("findings", share, max(1, round(WEIGHTS["findings"] * num / (num + missing))), why)


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
    if (fall := dynamics.throughput_fall) is not None:
        shares.append(1 - fall.lost_share)
        why.append(f"throughput fell from {number(fall.best)} to {number(fall.last)} samples per second")
    elif len(columns.throughput.values) >= 10:
        slowest = float(np.quantile(columns.throughput.values, 0.1) / max(np.median(columns.throughput.values), 1e-30))
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

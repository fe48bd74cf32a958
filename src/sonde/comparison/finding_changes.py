"""Findings of two runs: new, gone, in both. A rule that was not evaluated in a run does not count as clear there."""

from dataclasses import dataclass

from sonde.events import Finding, Severity
from sonde.report import Report


@dataclass(frozen=True, slots=True)
class ChangedFinding:
    """A finding of one run, and whether the same rule could be evaluated in the other."""

    finding: Finding
    evaluated_in_other: bool


@dataclass(frozen=True, slots=True)
class FindingChanges:
    """The first finding of each rule, causes before their consequences."""

    new: tuple[ChangedFinding, ...]  # in B only
    gone: tuple[ChangedFinding, ...]  # in A only
    same: tuple[tuple[Finding, Finding], ...]  # in A and in B

    @property
    def num_changes(self) -> int:
        """Problems that are known not to be in the other run."""
        return sum(one.evaluated_in_other and one.finding.severity.rank >= Severity.WARNING.rank for one in (*self.new, *self.gone))


def find_finding_changes(a: Report, b: Report) -> FindingChanges:
    in_a, in_b = ({finding.rule: finding for finding in reversed(report.findings)} for report in (a, b))
    rules = list(dict.fromkeys(finding.rule for finding in (*a.findings, *b.findings)))
    return FindingChanges(
        new=tuple(ChangedFinding(in_b[rule], rule in a.clear) for rule in rules if rule not in in_a),
        gone=tuple(ChangedFinding(in_a[rule], rule in b.clear) for rule in rules if rule not in in_b),
        same=tuple((in_a[rule], in_b[rule]) for rule in rules if rule in in_a and rule in in_b),
    )

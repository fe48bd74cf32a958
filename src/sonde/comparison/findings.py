"""What the rules found in two runs: new, gone, the same. A rule that could not tell is not one that found nothing."""

from __future__ import annotations

from dataclasses import dataclass

from sonde.events import Finding, Severity
from sonde.report import Report


@dataclass(frozen=True, slots=True)
class FoundIn:
    """A finding of one run, and whether the same rule could be evaluated in the other."""

    finding: Finding
    evaluated_in_other: bool


@dataclass(frozen=True, slots=True)
class FindingComparison:
    """By rule; the causes come first, what follows from them after."""

    new: tuple[FoundIn, ...]  # in B alone
    gone: tuple[FoundIn, ...]  # in A alone
    same: tuple[tuple[Finding, Finding], ...]  # as it is in A and in B

    @property
    def num_changes(self) -> int:
        """Mistakes that came or went, and are known not to be in the other run."""
        return sum(one.evaluated_in_other and one.finding.severity.rank >= Severity.WARNING.rank for one in (*self.new, *self.gone))


def compare_findings(a: Report, b: Report) -> FindingComparison:
    in_a, in_b = (_by_rule(report) for report in (a, b))
    return FindingComparison(
        new=tuple(FoundIn(finding, rule in a.clear) for rule, finding in in_b.items() if rule not in in_a),
        gone=tuple(FoundIn(finding, rule in b.clear) for rule, finding in in_a.items() if rule not in in_b),
        same=tuple((finding, in_b[rule]) for rule, finding in in_a.items() if rule in in_b),
    )


def _by_rule(report: Report) -> dict[str, Finding]:
    """The first of each rule, which the report puts before its others."""
    found: dict[str, Finding] = {}
    for finding in report.findings:
        found.setdefault(finding.rule, finding)
    return found

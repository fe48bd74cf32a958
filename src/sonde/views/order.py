"""Findings as families: each root cause with what follows from it. The report has ordered them; views only draw the order."""

from __future__ import annotations

from collections.abc import Sequence

from sonde.record import Finding

CONSEQUENCE = "consequence_of"
SOURCE, SOURCE_TEXT = "source", "source_text"
DRAWN_ELSEWHERE = frozenset({CONSEQUENCE, SOURCE, SOURCE_TEXT})  # evidence that has a place of its own in every view


def families(findings: Sequence[Finding]) -> list[tuple[Finding, list[Finding]]]:
    """(root cause, its consequences), in the report's order. A consequence whose cause is not there stands by itself."""
    found: list[tuple[Finding, list[Finding]]] = []
    for finding in findings:
        cause = finding.evidence.get(CONSEQUENCE)
        home = next((members for root, members in found if root.rule == cause), None)
        if home is None:
            found.append((finding, []))
        else:
            home.append(finding)
    return found


def numbers_of(finding: Finding) -> dict[str, float | str]:
    """The evidence that is shown as a table."""
    return {name: given for name, given in finding.evidence.items() if name not in DRAWN_ELSEWHERE}

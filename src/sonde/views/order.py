"""Findings as families: each root cause with what follows from it. The report has ordered them; views only draw the order."""

from __future__ import annotations

from collections.abc import Sequence

from sonde.events import Finding

CONSEQUENCE = "consequence_of"
SOURCE, SOURCE_TEXT = "source", "source_text"
PHRASE = 16  # characters: a shorter text is read at a glance among the numbers
LONGEST_WORD = 9  # characters that stand to the left of a line
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


def called(name: str) -> str:
    """How a reader is told of a piece of evidence: `num_nan` as `num nan`. A name with blanks is worded already, and may hold a path."""
    return name if " " in name else name.replace("_", " ")


def with_phrases(finding: Finding) -> tuple[dict[str, float | str], list[tuple[str, str]]]:
    """The same for a terminal: what is read at a glance, and phrases that deserve a line each, behind a word that says what they are."""
    short, phrases = dict[str, float | str](), list[tuple[str, str]]()
    for name, given in numbers_of(finding).items():
        word, _, rest = called(name).partition(" ")
        if isinstance(given, str) and len(given) >= PHRASE and " " in given and len(word) <= LONGEST_WORD:
            phrases.append((word, given if not rest or rest.isdigit() else f"{rest} {given}"))
        else:
            short[called(name)] = given
    return short, phrases

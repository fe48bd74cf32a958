"""The verdict as Markdown, for an issue, a chat or a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sonde.events import Finding
from sonde.rules.words import number
from sonde.views.facts import loss_series, notes, story
from sonde.views.numbers import value
from sonde.views.order import SOURCE, SOURCE_TEXT, called, families, numbers_of
from sonde.views.printable import printable
from sonde.views.sparkline import sparkline

if TYPE_CHECKING:
    from sonde.report import Report

SPECIAL = re.compile(r"([\\`*_\[\]<>#|~@&$]|:(?=//)|^[-+=])")
SPREADSHEET = ("=", "+", "-", "@")  # a table that is pasted into a spreadsheet must not become a formula


def render(report: Report) -> str:
    """The report as one Markdown document."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# Sonde: {report.verdict}"
    yield ""
    yield text(story(report))
    _, losses = loss_series(report)
    if losses:
        yield ""
        yield f"loss {number(losses[0])} {code(sparkline(losses))} {number(losses[-1])}"
    for cause, consequences in families(report.findings):
        yield from _finding(cause)
        for finding in consequences:
            place = f" in {code(finding.where)}" if finding.where else ""
            yield f"- and so **{text(finding.rule)}**{place} from step {finding.step}: {text(finding.cause)}"
    yield ""
    yield "## Notes"
    for name, said in notes(report):
        yield f"- {name}: {text(said)}"
    for row in report.not_evaluated:
        yield f"- not evaluated: {text(row.rule)}: {text(row.reason)}"


def _finding(finding: Finding) -> Iterator[str]:
    place = f" in {code(finding.where)}" if finding.where else ""
    yield ""
    yield f"## {finding.severity}: {text(finding.rule)}{place}"
    yield ""
    yield f"From step {finding.step}. {text(finding.cause)}"
    if SOURCE in finding.evidence:
        source = f"{finding.evidence[SOURCE]}  {str(finding.evidence.get(SOURCE_TEXT, '')).strip()}".strip()
        yield ""
        yield f"Line: {code(source)}"
    yield ""
    yield f"**Fix:** {text(finding.fix)}"
    evidence = numbers_of(finding)
    if evidence:
        yield ""
        yield "| evidence | |"
        yield "|---|---|"
        for name, given in evidence.items():
            yield f"| {cell(called(name))} | {cell(value(given)) if isinstance(given, str) else value(given)} |"
        yield ""


def text(given: str) -> str:
    """Text that Markdown and HTML inside of Markdown leave alone."""
    return SPECIAL.sub(r"\\\1", printable(given))


def cell(given: str) -> str:
    return text(f"'{given}" if given.startswith(SPREADSHEET) else given)


def code(given: str) -> str:
    """A code span that holds any text: its fence is longer than any row of backticks in it."""
    shown = printable(given)
    fence = "`" * (max((len(row) for row in re.findall(r"`+", shown)), default=0) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"

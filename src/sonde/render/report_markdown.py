"""Reports and comparisons as Markdown, for an issue, a chat or a pull request."""

import re
from collections.abc import Iterator, Sequence

from sonde.comparison.compare import RunComparison
from sonde.events import Finding
from sonde.formatting import number, printable
from sonde.render.comparison_content import comparison_notes, comparison_tables
from sonde.render.report_content import evidence, group_findings, loss_series, notes, place, run_sentence, source_line
from sonde.render.terminal.sparkline import sparkline
from sonde.report import Report
from sonde.report.report_types import verdict_words

SPECIAL = re.compile(r"([\\`*_\[\]<>#|~@&$]|:(?=//)|^[-+=])")
SPREADSHEET = ("=", "+", "-", "@")  # a table that is pasted into a spreadsheet must not become a formula


def report_markdown(report: Report) -> str:
    """A report as one Markdown document."""
    return "\n".join(_report(report)) + "\n"


def comparison_markdown(comparison: RunComparison) -> str:
    """A comparison of two runs as one Markdown document."""
    return "\n".join(_comparison(comparison)) + "\n"


def _report(report: Report) -> Iterator[str]:
    yield f"# Sonde: {verdict_words(report.verdict)}\n\n{_text(run_sentence(report))}"
    _, losses = loss_series(report)
    if losses:
        yield f"\n{_curve('loss', losses)}"
    for cause, consequences in group_findings(report.findings):
        yield from _finding(cause, report)
        for finding in consequences:
            yield f"- and so **{_text(finding.rule)}**{_in_place(finding, report)} from step {finding.step}: {_text(finding.cause)}"
    yield "\n## Notes"
    for name, note in notes(report):
        yield f"- {name}: {_text(note)}"
    for row in report.not_evaluated:
        yield f"- not evaluated: {_text(row.rule)}: {_text(row.reason)}"


def _finding(finding: Finding, report: Report) -> Iterator[str]:
    yield f"\n## {finding.severity}: {_text(finding.rule)}{_in_place(finding, report)}"
    yield f"\nFrom step {finding.step}. {_text(finding.cause)}"
    if source := source_line(finding):
        yield f"\nLine: {_code('  '.join(source).strip())}"
    yield f"\n**Fix:** {_text(finding.fix)}"
    if rows := evidence(finding):
        yield "\n| evidence | |\n|---|---|"
        for name, value in rows.items():
            yield f"| {_cell(name)} | {_cell(value) if isinstance(value, str) else number(value)} |"
        yield ""


def _in_place(finding: Finding, report: Report) -> str:
    return f" in {_code(place(finding, report))}" if finding.where else ""


def _comparison(comparison: RunComparison) -> Iterator[str]:
    yield f"# Sonde: {comparison.verdict}\n\n**{_text(comparison.headline)}**"
    for sentence in comparison.details:
        yield f"\n{_text(sentence)}"
    for one in comparison.losses:
        for letter, curve in (("A", one.curve_a), ("B", one.curve_b)):
            if curve:
                yield "\n" + _curve(f"{_text(one.series)} {letter}", [window.median for window in curve])
    for table in comparison_tables(comparison):
        yield f"\n| {_cell(table.title)} | A | B | |\n|---|---|---|---|"
        for row in table.rows:
            yield "| " + " | ".join(_cell(each) for each in row) + " |"
    for note in comparison_notes(comparison):
        yield f"\n{_text(note)}"


def _curve(name: str, values: Sequence[float]) -> str:
    return f"{name} {number(values[0])} {_code(sparkline(values))} {number(values[-1])}"


def _text(given: str) -> str:
    """Text in which nothing is interpreted as Markdown or HTML."""
    return SPECIAL.sub(r"\\\1", printable(given))


def _cell(given: str) -> str:
    return _text(f"'{given}" if given.startswith(SPREADSHEET) else given)


def _code(given: str) -> str:
    """A code span for any text: its fence is longer than any row of backticks inside."""
    shown = printable(given)
    fence = max(re.findall(r"`+", shown), key=len, default="") + "`"
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"

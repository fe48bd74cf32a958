"""The verdict for a terminal: what is wrong, where, why, and what to change. The root cause first, what follows from it below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from sonde.events import Finding, Severity
from sonde.rules.words import number
from sonde.views.facts import loss_series, notes, rate_series, story
from sonde.views.lines import line, paragraph
from sonde.views.numbers import value
from sonde.views.order import SOURCE, SOURCE_TEXT, families, with_phrases
from sonde.views.sparkline import is_log, sparkline

if TYPE_CHECKING:
    from sonde.report import Report

MARKS = {"healthy": ("✓", "ok", "bold green"), "problems": ("✗", "!!", "bold red"), "unknown": ("?", "?", "bold yellow")}
STYLES = {
    Severity.INFO: "bold blue",
    Severity.WARNING: "bold yellow",
    Severity.ERROR: "bold red",
    Severity.CRITICAL: "bold white on red",
}
INDENT = 12  # what stands to the left of the text: cause, source, fix …
CURVE_WIDTH = 56


class Verdict:
    """A report, drawn."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _head(self.report, options)
        for cause, consequences in families(self.report.findings):
            yield line()
            yield from _finding(cause, options)
            for finding in consequences:
                yield from _consequence(finding, options)
        yield line()
        yield from _foot(self.report, options)


def _head(report: Report, options: ConsoleOptions) -> Iterator[Text]:
    mark, plain, style = MARKS[report.verdict]
    label = f"{plain if options.ascii_only else mark} {report.verdict}"
    yield from paragraph(story(report), options.max_width, label=(label, style), indent=INDENT)
    for name, (_, values) in (("loss", loss_series(report)), ("rate", rate_series(report))):
        if values:
            yield _curve(name, values, options)


def _curve(name: str, values: Sequence[float], options: ConsoleOptions) -> Text:
    first, last = number(values[0]), number(values[-1])
    room = options.max_width - INDENT - len(first) - len(last) - 8
    curve = sparkline(values, max(min(CURVE_WIDTH, room), 4), ascii_only=options.ascii_only)
    scale = ("  log", "dim") if is_log(values) else ""
    return line((name.ljust(INDENT), "dim"), f"{first} ", *_coloured(curve), f" {last}", scale)


def _coloured(curve: str) -> Iterator[tuple[str, str]]:
    """Bad numbers in red: they are what a reader looks for first."""
    for char in curve:
        yield char, "bold red" if char in "✗↑↓N^v" else "cyan"


def _finding(finding: Finding, options: ConsoleOptions) -> Iterator[Text]:
    place = f" in {finding.where}" if finding.where else ""
    yield line(
        (f" {finding.severity.upper()} ", STYLES[finding.severity]),
        " ",
        (finding.rule, "bold"),
        (place, "bold cyan"),
        (f"  from step {finding.step:,}", "dim"),
    )
    width = options.max_width
    yield from paragraph(_sentence(finding.cause), width, label=("  cause", "dim"), indent=INDENT)
    if SOURCE in finding.evidence:
        source, text = str(finding.evidence[SOURCE]), str(finding.evidence.get(SOURCE_TEXT, "")).strip()
        fits = INDENT + len(source) + 3 + len(text) <= width
        yield line(("  line".ljust(INDENT), "dim"), (source, "cyan"), *(("   ", (text, "bold")) if fits and text else ()))
        if not fits:
            yield from paragraph(text, width, indent=INDENT, style="bold")
    yield from paragraph(_sentence(finding.fix), width, label=("  fix", "green"), indent=INDENT, style="green")
    separator = ", " if options.ascii_only else " · "
    short, phrases = with_phrases(finding)
    shown = separator.join(f"{name} {value(given)}" for name, given in short.items())
    for word, text in [("evidence", shown), *phrases] if shown else phrases:
        yield from paragraph(text, width, label=(f"  {word}", "dim"), indent=INDENT, style="dim")


def _consequence(finding: Finding, options: ConsoleOptions) -> Iterator[Text]:
    place = f" in {finding.where}" if finding.where else ""
    branch = "  `- " if options.ascii_only else "  └─ "
    yield line((branch, "dim"), ("and so: ", "dim"), (f"{finding.rule}{place}", ""), (f"  from step {finding.step:,}", "dim"))
    yield from paragraph(_sentence(finding.cause), options.max_width, indent=INDENT, style="dim")


def _foot(report: Report, options: ConsoleOptions) -> Iterator[Text]:
    for name, text in notes(report):
        yield from paragraph(text, options.max_width, label=(name, "dim"), indent=INDENT, style="dim")


def _sentence(text: str) -> str:
    """Rules write sentences without the capital and the stop, so that they can stand inside another one."""
    text = text.strip()
    return text if not text or text[-1] in ".!?" else text + "."

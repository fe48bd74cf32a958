"""A report for a terminal: what is wrong, where, why, and what to change. Each root cause is followed by its consequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from sonde.events import Finding, Severity
from sonde.formatting import number, number_or_text
from sonde.render.report_content import evidence, group_findings, in_place, loss_series, notes, rate_series, run_sentence, source_line
from sonde.render.terminal.print_to_terminal import line, paragraph
from sonde.render.terminal.sparkline import is_log, sparkline
from sonde.report.report_types import verdict_words

if TYPE_CHECKING:
    from sonde.report import Report

MARKS = {
    "healthy": ("✓", "ok", "bold green"), "nothing_found": ("–", "-", "bold"), "problems": ("✗", "!!", "bold red"),
    "unknown": ("?", "?", "bold yellow"),
}  # fmt: skip
STYLES = {Severity.INFO: "bold blue", Severity.WARNING: "bold yellow", Severity.ERROR: "bold red", Severity.CRITICAL: "bold white on red"}
INDENT = 12  # characters for the words to the left of the text: cause, line, fix …
CURVE_WIDTH = 56
PHRASE = 16  # characters: a shorter text is read at a glance among the numbers
LONGEST_LABEL = 9  # characters of a word to the left of a line


class TerminalReport:
    """A report for a rich console.

    Args:
        has_findings: False leaves the findings out: `sonde diagnose --follow` has printed each when it appeared.
        is_verbose: List every rule that was not evaluated, with the reason.
    """

    def __init__(self, report: Report, *, has_findings: bool = True, is_verbose: bool = False) -> None:
        self.report, self.has_findings, self.is_verbose = report, has_findings, is_verbose

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _head(self.report, options)
        if self.has_findings:
            yield from _findings(self.report, self.report.findings, options)
        yield line()
        yield from _foot(self.report, options)
        if self.is_verbose and self.report.not_evaluated:
            yield line()
            yield line(("not evaluated", "bold"))
            for row in self.report.not_evaluated:
                yield from paragraph(f"{row.rule}: {row.reason}", options.max_width, label=("  ", ""), indent=2, style="dim")


class TerminalFindings:
    """Some findings of a report for a rich console."""

    def __init__(self, report: Report, findings: Sequence[Finding]) -> None:
        self.report, self.findings = report, findings

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _findings(self.report, self.findings, options)


def _findings(report: Report, findings: Sequence[Finding], options: ConsoleOptions) -> Iterator[Text]:
    for cause, consequences in group_findings(findings):
        yield line()
        yield from _finding(cause, report, options)
        for finding in consequences:
            yield from _consequence(finding, report, options)


def _head(report: Report, options: ConsoleOptions) -> Iterator[Text]:
    mark, plain, style = MARKS[report.verdict]
    label = f"{plain if options.ascii_only else mark} {verdict_words(report.verdict)}"
    yield from paragraph(run_sentence(report), options.max_width, label=(label, style), indent=max(INDENT, len(label) + 2))
    for name, (_, values) in (("loss", loss_series(report)), ("rate", rate_series(report))):
        if values:
            yield _curve(name, values, options)


def _curve(name: str, values: Sequence[float], options: ConsoleOptions) -> Text:
    first, last = number(values[0]), number(values[-1])
    room = options.max_width - INDENT - len(first) - len(last) - 8
    curve = sparkline(values, max(min(CURVE_WIDTH, room), 4), ascii_only=options.ascii_only)
    scale = ("  log", "dim") if is_log(values) else ""
    return line((name.ljust(INDENT), "dim"), f"{first} ", *_colored(curve), f" {last}", scale)


def _colored(curve: str) -> Iterator[tuple[str, str]]:
    """Marks of non-finite values in red."""
    for char in curve:
        yield char, "bold red" if char in "✗↑↓N^v" else "cyan"


def _finding(finding: Finding, report: Report, options: ConsoleOptions) -> Iterator[Text]:
    yield line(
        (f" {finding.severity.upper()} ", STYLES[finding.severity]),
        " ",
        (finding.rule, "bold"),
        (in_place(finding, report), "bold cyan"),
        (f"  from step {finding.step:,}", "dim"),
    )
    width = options.max_width
    yield from paragraph(_sentence(finding.cause), width, label=("  cause", "dim"), indent=INDENT)
    if found := source_line(finding):
        source, text = found
        fits = INDENT + len(source) + 3 + len(text) <= width
        yield line(("  line".ljust(INDENT), "dim"), (source, "cyan"), *(("   ", (text, "bold")) if fits and text else ()))
        if not fits:
            yield from paragraph(text, width, indent=INDENT, style="bold")
    yield from paragraph(_sentence(finding.fix), width, label=("  fix", "green"), indent=INDENT, style="green")
    for label, text in _evidence(finding, ", " if options.ascii_only else " · "):
        yield from paragraph(text, width, label=(f"  {label}", "dim"), indent=INDENT, style="dim")


def _evidence(finding: Finding, separator: str) -> Iterator[tuple[str, str]]:
    """(label, text) of each line: numbers and short texts share one, a long text gets its own with the first word of its name as label."""
    short, long = list[str](), list[tuple[str, str]]()
    for name, given in evidence(finding).items():
        word, _, rest = name.partition(" ")
        if isinstance(given, str) and len(given) >= PHRASE and " " in given and len(word) <= LONGEST_LABEL:
            long.append((word, given if not rest or rest.isdigit() else f"{rest} {given}"))
        else:
            short.append(f"{name} {number_or_text(given)}")
    if short:
        yield "evidence", separator.join(short)
    yield from long


def _consequence(finding: Finding, report: Report, options: ConsoleOptions) -> Iterator[Text]:
    branch = "  `- " if options.ascii_only else "  └─ "
    head = f"{finding.rule}{in_place(finding, report)}"
    yield line((branch, "dim"), ("and so: ", "dim"), (head, ""), (f"  from step {finding.step:,}", "dim"))
    yield from paragraph(_sentence(finding.cause), options.max_width, indent=INDENT, style="dim")


def _foot(report: Report, options: ConsoleOptions) -> Iterator[Text]:
    for name, text in notes(report):
        yield from paragraph(text, options.max_width, label=(name, "dim"), indent=INDENT, style="dim")


def _sentence(text: str) -> str:
    """With a full stop: rules write sentences without one, so that they can be used inside another sentence."""
    text = text.strip()
    return text if not text or text[-1] in ".!?" else text + "."

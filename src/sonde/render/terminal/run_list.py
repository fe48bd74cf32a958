"""The list of runs that `sonde runs` prints: one line per run with start, steps, verdict, last loss and first finding."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from sonde.formatting import DASH, counted, layer_name, printable, shorten
from sonde.render.terminal.print_to_terminal import line, paragraph
from sonde.render.terminal.report_terminal import MARKS
from sonde.report.report_types import verdict_words

if TYPE_CHECKING:
    from sonde.report.verdict_cache import CachedVerdict, ListedRun

HEADINGS = ("run", "started", "steps", "verdict", "loss", "first finding")
GAP = "  "
LEAST_NAME = 16  # characters of a long name that are shown in a narrow terminal
LEAST_FINDING = 22
TIME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_")  # at the beginning of a name
UNUSUAL_ENDINGS = ("exception", "interrupted", "killed", "running")


class RunList:
    """The runs of a directory; `num_more` are not listed."""

    def __init__(self, runs: Sequence[ListedRun], *, num_more: int = 0) -> None:
        self.runs, self.num_more = runs, num_more

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        dash = "-" if options.ascii_only else DASH
        rows = [HEADINGS, *(_cells(run, dash, options) for run in self.runs)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
        room = options.max_width - sum(widths[1:5]) - len(GAP) * (len(HEADINGS) - 1)
        if widths[0] + widths[5] > room:  # the second column has the time, and what is left can be typed
            rows = [(TIME.sub("", row[0], count=1) or row[0], *row[1:]) for row in rows]
            widths[0] = max(len(row[0]) for row in rows)
        widths[0] = min(widths[0], max(room - min(widths[5], max(LEAST_FINDING, room // 2)), LEAST_NAME))
        widths[5] = max(room - widths[0], 1)
        yield _row(HEADINGS, widths, "dim", "dim")
        for run, cells in zip(self.runs, rows[1:]):
            if run.error:
                yield from paragraph(run.error, options.max_width, label=(cells[0] + GAP, ""), indent=widths[0] + len(GAP), style="red")
            else:
                yield _row(cells, widths, "", MARKS[run.verdict.verdict][2] if run.verdict else "dim")
        if unjudged := [run for run in self.runs if run.verdict is None and not run.error]:
            yield line((f"{dash}  {counted(len(unjudged), 'run')} not judged in time: sonde diagnose {unjudged[0].name}", "dim"))
        if self.num_more:
            yield line((f"and {counted(self.num_more, 'more run')}: sonde runs -n {len(self.runs) + self.num_more}", "dim"))


def _row(cells: Sequence[str], widths: Sequence[int], style: str, verdict_style: str) -> Text:
    name, started, steps, verdict, loss, finding = (
        f"{shorten(cell, width):{'>' if heading in ('steps', 'loss') else '<'}{width}}"
        for cell, width, heading in zip(cells, widths, HEADINGS)
    )
    return line((GAP.join((name, started, steps, "")), style), (verdict, verdict_style), (f"{GAP}{loss}{GAP}{finding}".rstrip(), style))


def _cells(run: ListedRun, dash: str, options: ConsoleOptions) -> tuple[str, ...]:
    name = printable(run.name)
    started = _date(run.started) or dash
    if run.verdict is None:
        return name, started, dash, dash, dash, dash
    verdict = run.verdict
    mark = MARKS[verdict.verdict][options.ascii_only]
    words = f"{mark} {verdict_words(verdict.verdict)}"
    return name, started, f"{verdict.num_steps:,}", words, printable(verdict.last_loss) or dash, _finding(verdict)


def _date(started: float) -> str:
    """Day and time of this year, else the date."""
    try:
        date = time.localtime(started)
    except (OverflowError, ValueError, OSError):  # the number comes from a file of the run
        return ""
    return time.strftime("%m-%d %H:%M" if date.tm_year == time.localtime().tm_year else "%Y-%m-%d", date) if started > 0 else ""


def _finding(verdict: CachedVerdict) -> str:
    """The first finding and its place, and how the run ended if that is unusual."""
    place = f" in {layer_name(verdict.where, verdict.layer_type)}" if verdict.where else ""
    ended = f"({verdict.ended})" if verdict.ended.startswith(UNUSUAL_ENDINGS) else ""
    return printable(f"{verdict.rule}{place} {ended}".strip())

"""Reports as one self-contained HTML page without a script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sonde.events import Finding
from sonde.formatting import number_or_text
from sonde.render.html.html_page import cell, definition_list, html_page, html_text, table
from sonde.render.html.layer_statistics import COLUMNS, LayerStatistics, last_statistics
from sonde.render.html.svg_chart import ChartLine, line_chart
from sonde.render.report_content import (
    evidence,
    group_findings,
    loss_series,
    notes,
    place,
    rate_series,
    run_sentence,
    source_line,
)
from sonde.render.terminal.sparkline import is_log

if TYPE_CHECKING:
    from sonde.report import Report
    from sonde.runlog.reader import Run

HEADLINES = {"healthy": "Healthy", "problems": "", "unknown": "Unknown: nothing could be judged"}  # problems: the rules that found them


def report_html(reports: Sequence[tuple[Report, Run]]) -> str:
    """One page on one or more runs."""
    title = " · ".join(run.name for _, run in reports)
    body = "".join(f'<section class="subject">{"".join(_report(report, run))}</section>' for report, run in reports)
    return html_page(title, body)


def _report(report: Report, run: Run) -> Iterator[str]:
    causes = group_findings(report.findings)
    headline = HEADLINES[report.verdict] or ", ".join(dict.fromkeys(cause.rule for cause, _ in causes))
    yield f'<h1><span class="verdict {html_text(report.verdict)}">{html_text(headline)}</span></h1>'
    yield f'<p class="story">{html_text(run.name)}<br>{html_text(run_sentence(report))}</p>'
    yield _chart("Loss", *loss_series(report))
    yield _chart("Learning rate", *rate_series(report))
    for cause, consequences in causes:
        yield _finding(cause, report)
        yield from (_consequence(finding, report) for finding in consequences)
    yield "<h2>What else is known</h2>"
    yield definition_list("notes", notes(report))
    if report.not_evaluated:
        rows = "".join(f"<li><b>{html_text(row.rule)}</b>: {html_text(row.reason)}</li>" for row in report.not_evaluated)
        yield f"<details><summary>Not evaluated: {len(report.not_evaluated)} rules</summary>"
        yield f'<ul class="plain">{rows}</ul></details>'
    yield from (_statistics(each) for each in last_statistics(run))


def _chart(name: str, steps: Sequence[int], values: Sequence[float]) -> str:
    if not steps:
        return ""
    scale = ", logarithmic" if is_log(values) else ""
    return f"<figure><figcaption>{name} by step{scale}</figcaption>{line_chart([ChartLine(steps, values)], name=name.lower())}</figure>"


def _finding(finding: Finding, report: Report) -> str:
    found = source_line(finding)
    source = f'<div class="source mono"><b>{html_text(found[0])}</b>{html_text(found[1])}</div>' if found else ""
    return (
        f'<article class="finding {html_text(finding.severity)}">{_head(finding, finding.severity, report)}'
        f'<p>{html_text(finding.cause)}</p>{source}<p class="fix">{html_text(finding.fix)}</p>{_evidence(finding)}</article>'
    )


def _consequence(finding: Finding, report: Report) -> str:
    """Without a fix: it disappears with its cause."""
    return (
        f'<article class="finding consequence {html_text(finding.severity)}">{_head(finding, "and so", report)}'
        f"<p>{html_text(finding.cause)}</p>{_evidence(finding)}</article>"
    )


def _head(finding: Finding, badge: str, report: Report) -> str:
    where = f'<code class="where">{html_text(place(finding, report))}</code>' if finding.where else ""
    return (
        f'<div class="head"><span class="badge">{html_text(badge)}</span><h3>{html_text(finding.rule)}</h3>{where}'
        f'<span class="where">from step {finding.step:,}</span></div>'
    )


def _evidence(finding: Finding) -> str:
    return definition_list("evidence", [(name, number_or_text(given)) for name, given in evidence(finding).items()])


def _statistics(statistics: LayerStatistics) -> str:
    rows = [
        (
            f'<td>{html_text(row.path)}<span class="kind">{html_text(row.type)}</span></td>',
            *(cell(each.text, css_class="bad" if each.bad else "") for each in row.cells),
        )
        for row in statistics.rows
    ]
    summary = f"<summary><h2>{html_text(statistics.title)}</h2> at step {statistics.step:,}</summary>"
    return f"<details{' open' if statistics.bad else ''}>{summary}{table(('', *COLUMNS), rows)}</details>"

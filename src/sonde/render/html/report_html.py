"""Reports as one self-contained HTML page without a script."""

from collections.abc import Iterator, Mapping, Sequence

from sonde.events import Finding
from sonde.formatting import number_or_text
from sonde.render import report_content as content
from sonde.render.html.html_page import cell, definition_list, html_page, html_text, table
from sonde.render.html.layer_statistics import COLUMNS, LayerStatistics, last_statistics
from sonde.render.html.svg_chart import ChartLine, line_chart
from sonde.render.terminal.sparkline import is_log
from sonde.report import Report
from sonde.runlog.reader import Run

HEADLINES = {"healthy": "Healthy", "problems": "Problems", "unknown": "Nothing could be told"}


def report_html(reports: Sequence[tuple[Report, Run]]) -> str:
    """One page on one or more runs."""
    body = "".join(f'<section class="subject">{"".join(_report(report, run))}</section>' for report, run in reports)
    return html_page(" · ".join(run.name for _, run in reports), body)


def _report(report: Report, run: Run) -> Iterator[str]:
    causes, types = content.group_findings(report.findings), content.layer_types(run)
    headline = ", ".join(dict.fromkeys(cause.rule for cause, _ in causes)) or HEADLINES[report.verdict]
    yield f'<h1><span class="verdict {html_text(report.verdict)}">{html_text(headline)}</span></h1>'
    yield f'<p class="story">{html_text(run.name)}<br>{html_text(content.run_sentence(report))}</p>'
    yield _chart("Loss", *content.loss_series(report))
    yield _chart("Learning rate", *content.rate_series(report))
    for cause, consequences in causes:
        yield _finding(cause, types)
        yield from (_consequence(finding, types) for finding in consequences)
    yield f"<h2>What else is known</h2>{definition_list('notes', content.notes(report))}"
    if report.not_evaluated:
        rows = "".join(f"<li><b>{html_text(row.rule)}</b>: {html_text(row.reason)}</li>" for row in report.not_evaluated)
        yield f'<details><summary>Not evaluated: {len(report.not_evaluated)} rules</summary><ul class="plain">{rows}</ul></details>'
    yield from (_statistics(each) for each in last_statistics(run))


def _chart(name: str, steps: Sequence[int], values: Sequence[float]) -> str:
    if not steps:
        return ""
    scale = ", logarithmic" if is_log(values) else ""
    return f"<figure><figcaption>{name} by step{scale}</figcaption>{line_chart([ChartLine(steps, values)], name=name.lower())}</figure>"


def _finding(finding: Finding, types: Mapping[str, str]) -> str:
    found = content.source_line(finding)
    source = f'<div class="source mono"><b>{html_text(found[0])}</b>{html_text(found[1])}</div>' if found else ""
    return (
        f'<article class="finding {html_text(finding.severity)}">{_head(finding, finding.severity, types)}'
        f'<p>{html_text(finding.cause)}</p>{source}<p class="fix">{html_text(finding.fix)}</p>{_evidence(finding)}</article>'
    )


def _consequence(finding: Finding, types: Mapping[str, str]) -> str:
    """Without a fix: it disappears with its cause."""
    return (
        f'<article class="finding consequence {html_text(finding.severity)}">{_head(finding, "and so", types)}'
        f"<p>{html_text(finding.cause)}</p>{_evidence(finding)}</article>"
    )


def _head(finding: Finding, badge: str, types: Mapping[str, str]) -> str:
    where = f'<code class="where">{html_text(content.place(finding, types))}</code>' if finding.where else ""
    return (
        f'<div class="head"><span class="badge">{html_text(badge)}</span><h3>{html_text(finding.rule)}</h3>{where}'
        f'<span class="where">from step {finding.step:,}</span></div>'
    )


def _evidence(finding: Finding) -> str:
    return definition_list("evidence", [(name, number_or_text(given)) for name, given in content.evidence(finding).items()])


def _statistics(statistics: LayerStatistics) -> str:
    rows = []
    for row in statistics.rows:
        layer = f'<td>{html_text(row.path)}<span class="kind">{html_text(row.type)}</span></td>'
        rows.append([layer, *(cell(each.text, css_class="bad" if each.bad else "") for each in row.cells)])
    summary = f"<summary><h2>{html_text(statistics.title)}</h2> at step {statistics.step:,}</summary>"
    return f"<details{' open' if statistics.bad else ''}>{summary}{table(('', *COLUMNS), rows)}</details>"

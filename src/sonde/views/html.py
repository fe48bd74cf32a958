"""The verdict as one self-contained page: no script, nothing to load, light and dark, every name in it escaped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sonde.events import Finding
from sonde.views.chart import curve
from sonde.views.facts import loss_series, notes, rate_series, story
from sonde.views.numbers import value
from sonde.views.order import SOURCE, SOURCE_TEXT, called, families, numbers_of
from sonde.views.sheet import html_text, sheet
from sonde.views.sparkline import is_log
from sonde.views.statistics import COLUMNS, Table, last_statistics

if TYPE_CHECKING:
    from sonde.report import Report
    from sonde.runlog.reader import Run

HEADLINES = {"healthy": "Healthy", "problems": "Problems", "unknown": "Nothing could be told"}


def document(subjects: Sequence[tuple[Report, Run]]) -> str:
    """One page about one or more runs."""
    title = " · ".join(run.name for _, run in subjects)
    body = "".join(f'<section class="subject">{"".join(_subject(report, run))}</section>' for report, run in subjects)
    return sheet(title, body)


def _subject(report: Report, run: Run) -> Iterator[str]:
    causes = families(report.findings)
    headline = ", ".join(dict.fromkeys(cause.rule for cause, _ in causes)) or HEADLINES[report.verdict]
    yield f'<h1><span class="verdict {html_text(report.verdict)}">{html_text(headline)}</span></h1>'
    yield f'<p class="story">{html_text(run.name)}<br>{html_text(story(report))}</p>'
    yield _chart("Loss", *loss_series(report))
    yield _chart("Learning rate", *rate_series(report))
    for cause, consequences in causes:
        yield _finding(cause)
        yield from (_consequence(finding) for finding in consequences)
    told = notes(report)
    if told:
        yield "<h2>What else is known</h2>"
        yield _definitions("notes", dict(told))
    if report.not_evaluated:
        rows = "".join(f"<li><b>{html_text(row.rule)}</b>: {html_text(row.reason)}</li>" for row in report.not_evaluated)
        yield f"<details><summary>Not evaluated: {len(report.not_evaluated)} rules</summary>"
        yield f'<ul class="plain">{rows}</ul></details>'
    yield from (_statistics(table) for table in last_statistics(run))


def _chart(name: str, steps: Sequence[int], values: Sequence[float]) -> str:
    if not steps:
        return ""
    scale = ", logarithmic" if is_log(values) else ""
    return f"<figure><figcaption>{name} by step{scale}</figcaption>{curve(steps, values, name=name.lower())}</figure>"


def _finding(finding: Finding) -> str:
    source = ""
    if SOURCE in finding.evidence:
        text = str(finding.evidence.get(SOURCE_TEXT, "")).strip()
        source = f'<div class="source mono"><b>{html_text(finding.evidence[SOURCE])}</b>{html_text(text)}</div>'
    return (
        f'<article class="finding {html_text(finding.severity)}">{_head(finding, finding.severity)}'
        f'<p>{html_text(finding.cause)}</p>{source}<p class="fix">{html_text(finding.fix)}</p>{_evidence(finding)}</article>'
    )


def _consequence(finding: Finding) -> str:
    """What goes away with its cause: no fix of its own."""
    return (
        f'<article class="finding consequence {html_text(finding.severity)}">{_head(finding, "and so")}'
        f"<p>{html_text(finding.cause)}</p>{_evidence(finding)}</article>"
    )


def _head(finding: Finding, badge: str) -> str:
    where = f'<code class="where">{html_text(finding.where)}</code>' if finding.where else ""
    return (
        f'<div class="head"><span class="badge">{html_text(badge)}</span><h3>{html_text(finding.rule)}</h3>{where}'
        f'<span class="where">from step {finding.step:,}</span></div>'
    )


def _evidence(finding: Finding) -> str:
    return _definitions("evidence", {called(name): value(v) for name, v in numbers_of(finding).items()})


def _definitions(name: str, rows: Mapping[str, str]) -> str:
    inner = "".join(f"<div><dt>{html_text(term)}</dt><dd>{html_text(text)}</dd></div>" for term, text in rows.items())
    return f'<dl class="{name}">{inner}</dl>' if inner else ""


def _statistics(table: Table) -> str:
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    rows = "".join(
        f'<tr><td>{html_text(row.path)}<span class="kind">{html_text(row.type)}</span></td>'
        + "".join(f'<td{" class=bad" if cell.bad else ""}>{html_text(cell.text)}</td>' for cell in row.cells)
        + "</tr>"
        for row in table.rows
    )
    return (
        f"<details{' open' if table.bad else ''}><summary><h2>{html_text(table.title)}</h2> at step {table.step:,}</summary>"
        f'<div class="table"><table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>'
    )

"""The verdict as one self-contained page: no script, nothing to load, light and dark, every name in it escaped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from sonde.record import Finding
from sonde.views.chart import curve
from sonde.views.facts import loss_series, notes, story
from sonde.views.numbers import value
from sonde.views.order import SOURCE, SOURCE_TEXT, families, numbers_of
from sonde.views.printable import printable
from sonde.views.sparkline import is_log
from sonde.views.statistics import COLUMNS, Table, last_statistics

if TYPE_CHECKING:
    from sonde.report import Report
    from sonde.run.reader import Run

# The page needs nothing from anywhere, so a browser is told to fetch nothing, whatever a name in the run may contain.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
HEADLINES = {"healthy": "Healthy", "problems": "Problems", "unknown": "Nothing could be told"}


def document(subjects: Sequence[tuple[Report, Run]]) -> str:
    """One page about one or more runs."""
    style = files("sonde.views").joinpath("style.css").read_text(encoding="utf-8")
    title = " · ".join(run.name for _, run in subjects)
    body = "".join(f'<section class="subject">{"".join(_subject(report, run))}</section>' for report, run in subjects)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)} – Sonde</title>\n<style>\n{style}</style></head>\n<body>"
        f'<div class="brand">SONDE</div>{body}</body></html>\n'
    )


def _subject(report: Report, run: Run) -> Iterator[str]:
    causes = families(report.findings)
    headline = ", ".join(dict.fromkeys(cause.rule for cause, _ in causes)) or HEADLINES[report.verdict]
    yield f'<h1><span class="verdict {_text(report.verdict)}">{_text(headline)}</span></h1>'
    yield f'<p class="story">{_text(run.name)}<br>{_text(story(report))}</p>'
    yield _loss_chart(*loss_series(report))
    for cause, consequences in causes:
        yield _finding(cause)
        yield from (_consequence(finding) for finding in consequences)
    told = notes(report)
    if told:
        yield "<h2>What else is known</h2>"
        yield _definitions("notes", dict(told))
    if report.not_evaluated:
        rows = "".join(f"<li><b>{_text(row.rule)}</b>: {_text(row.reason)}</li>" for row in report.not_evaluated)
        yield f"<details><summary>Not evaluated: {len(report.not_evaluated)} rules</summary>"
        yield f'<ul class="plain">{rows}</ul></details>'
    yield from (_statistics(table) for table in last_statistics(run))


def _loss_chart(steps: Sequence[int], losses: Sequence[float]) -> str:
    if not steps:
        return ""
    scale = ", logarithmic" if is_log(losses) else ""
    return f"<figure><figcaption>Loss by step{scale}</figcaption>{curve(steps, losses, name='loss')}</figure>"


def _finding(finding: Finding) -> str:
    source = ""
    if SOURCE in finding.evidence:
        text = str(finding.evidence.get(SOURCE_TEXT, "")).strip()
        source = f'<div class="source mono"><b>{_text(finding.evidence[SOURCE])}</b>{_text(text)}</div>'
    return (
        f'<article class="finding {_text(finding.severity)}">{_head(finding, finding.severity)}'
        f'<p>{_text(finding.cause)}</p>{source}<p class="fix">{_text(finding.fix)}</p>{_evidence(finding)}</article>'
    )


def _consequence(finding: Finding) -> str:
    """What goes away with its cause: no fix of its own."""
    return (
        f'<article class="finding consequence {_text(finding.severity)}">{_head(finding, "and so")}'
        f"<p>{_text(finding.cause)}</p>{_evidence(finding)}</article>"
    )


def _head(finding: Finding, badge: str) -> str:
    where = f'<code class="where">{_text(finding.where)}</code>' if finding.where else ""
    return (
        f'<div class="head"><span class="badge">{_text(badge)}</span><h3>{_text(finding.rule)}</h3>{where}'
        f'<span class="where">from step {finding.step:,}</span></div>'
    )


def _evidence(finding: Finding) -> str:
    return _definitions("evidence", {name.replace("_", " "): value(v) for name, v in numbers_of(finding).items()})


def _definitions(name: str, rows: Mapping[str, str]) -> str:
    inner = "".join(f"<div><dt>{_text(term)}</dt><dd>{_text(text)}</dd></div>" for term, text in rows.items())
    return f'<dl class="{name}">{inner}</dl>' if inner else ""


def _statistics(table: Table) -> str:
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    rows = "".join(
        f'<tr><td>{_text(row.path)}<span class="kind">{_text(row.type)}</span></td>'
        + "".join(f'<td{" class=bad" if cell.bad else ""}>{_text(cell.text)}</td>' for cell in row.cells)
        + "</tr>"
        for row in table.rows
    )
    return (
        f"<details{' open' if table.bad else ''}><summary><h2>{_text(table.title)}</h2> at step {table.step:,}</summary>"
        f'<div class="table"><table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>'
    )


def _text(given: object) -> str:
    """Text of the user's, safe between tags and in quoted attributes."""
    return escape(printable(given))

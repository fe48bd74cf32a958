"""Reports as one self-contained HTML page without a script."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from sonde.events import Finding, Kind, Site
from sonde.formatting import DASH, number, number_or_text
from sonde.render import report_content as content
from sonde.render.html.html_page import cell, definition_list, html_page, html_text, table
from sonde.render.html.svg_chart import ChartLine, line_chart
from sonde.render.terminal.sparkline import is_log
from sonde.report import Report
from sonde.runlog.run_reader import Run

HEADLINES = {  # problems: the rules that found them
    "healthy": "Healthy", "nothing_found": "Nothing found", "problems": "", "unknown": "Unknown: too little was seen to judge",
}  # fmt: skip
COLUMNS = ("mean", "std", "min", "max", "l2", "zeros", "nan", "inf")
TITLES = {
    Kind.ACTIVATION: "Outputs of layers", Kind.ACTIVATION_GRADIENT: "Gradients of outputs", Kind.PARAMETER: "Parameters",
    Kind.GRADIENT: "Gradients of parameters", Kind.UPDATE: "Updates of parameters",
}  # fmt: skip


def report_html(reports: Sequence[tuple[Report, Run]]) -> str:
    """One page on one or more runs."""
    body = "".join(f'<section class="subject">{"".join(_report(report, run))}</section>' for report, run in reports)
    return html_page(" · ".join(run.name for _, run in reports), body)


def _report(report: Report, run: Run) -> Iterator[str]:
    causes = content.group_findings(report.findings)
    headline = HEADLINES[report.verdict] or ", ".join(dict.fromkeys(cause.rule for cause, _ in causes))
    yield f'<h1><span class="verdict {html_text(report.verdict)}">{html_text(headline)}</span></h1>'
    yield f'<p class="story">{html_text(run.name)}<br>{html_text(content.run_sentence(report))}</p>'
    yield _chart("Loss", *content.loss_series(report))
    yield _chart("Learning rate", *content.rate_series(report))
    for cause, consequences in causes:
        yield _finding(cause, report)
        yield from (_finding(finding, report, is_consequence=True) for finding in consequences)
    yield f"<h2>What else is known</h2>{definition_list('notes', content.notes(report))}"
    if report.not_evaluated:
        rows = "".join(f"<li><b>{html_text(row.rule)}</b>: {html_text(row.reason)}</li>" for row in report.not_evaluated)
        yield f'<details><summary>Not evaluated: {len(report.not_evaluated)} rules</summary><ul class="plain">{rows}</ul></details>'
    yield from _statistics(run)


def _chart(name: str, steps: Sequence[int], values: Sequence[float]) -> str:
    if not steps:
        return ""
    scale = ", logarithmic" if is_log(values) else ""
    return f"<figure><figcaption>{name} by step{scale}</figcaption>{line_chart([ChartLine(steps, values)], name=name.lower())}</figure>"


def _finding(finding: Finding, report: Report, *, is_consequence: bool = False) -> str:
    """A consequence has no fix: it disappears with its cause."""
    found = None if is_consequence else content.source_line(finding)
    source = f'<div class="source mono"><b>{html_text(found[0])}</b>{html_text(found[1])}</div>' if found else ""
    fix = "" if is_consequence else f'<p class="fix">{html_text(finding.fix)}</p>'
    where = f'<code class="where">{html_text(content.place(finding, report))}</code>' if finding.where else ""
    rows = [(name, number_or_text(value)) for name, value in content.evidence(finding).items()]
    return (
        f'<article class="finding {"consequence " if is_consequence else ""}{html_text(finding.severity)}"><div class="head">'
        f'<span class="badge">{"and so" if is_consequence else html_text(finding.severity)}</span><h3>{html_text(finding.rule)}</h3>{where}'
        f'<span class="where">from step {finding.step:,}</span></div>'
        f"<p>{html_text(finding.cause)}</p>{source}{fix}{definition_list('evidence', rows)}</article>"
    )


def _statistics(run: Run) -> Iterator[str]:
    """One table for each kind of tensor, at the last step at which it was measured."""
    for kind, title in TITLES.items():
        for frame in deque(run.frames(kind), maxlen=1):
            rows, is_bad = [], False
            for number_of_site, values in zip(frame.sites.tolist(), frame.values.T.tolist()):
                if (site := run.sites.get(number_of_site)) is not None:
                    cells = statistics_cells(dict(zip(frame.fields, values)))
                    layer = f'<td>{html_text(_site_name(site))}<span class="kind">{html_text(site.type)}</span></td>'
                    rows.append([layer, *(cell(text, css_class="bad" if bad else "") for text, bad in cells)])
                    is_bad = is_bad or any(bad for _, bad in cells)
            summary = f"<summary><h2>{html_text(title)}</h2> at step {frame.step:,}</summary>"
            yield f"<details{' open' if is_bad else ''}>{summary}{table(('', *COLUMNS), rows)}</details>"


def _site_name(site: Site) -> str:
    path = f"{site.model}: {site.path or '(model)'}" if site.model else site.path or "(model)"
    return path + (f" (call {site.call + 1})" if site.call else "") + (f" [{site.item}]" if site.item else "")


def statistics_cells(values: Mapping[str, float]) -> list[tuple[str, bool]]:
    """The text of each of COLUMNS, and whether the tensor has non-finite values or nothing but zeros."""
    num, nan, inf, zeros = (values.get(name, 0.0) for name in ("num", "nan", "inf", "zeros"))
    if not num:
        return [("none", False), *[("", False)] * (len(COLUMNS) - 1)]
    cells = {name: (number(values.get(name, math.nan)), math.isnan(values.get(name, math.nan))) for name in COLUMNS}
    cells["zeros"] = f"{zeros / num:.0%}".replace("%", " %"), zeros == num
    if nan + inf >= num:  # the other statistics are of its finite numbers, and it has none
        cells = dict.fromkeys(COLUMNS, (DASH, False))
    return [*(cells | {"nan": (number(nan), nan > 0), "inf": (number(inf), inf > 0)}).values()]

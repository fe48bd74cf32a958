"""A comparison of two runs as one self-contained HTML page: the verdict, both losses in one chart, and the tables."""

from collections.abc import Iterator

from sonde.comparison.compare import RunComparison
from sonde.comparison.loss_curves import LossComparison
from sonde.render.comparison_content import ComparisonTable, comparison_notes, comparison_tables
from sonde.render.html.html_page import bullet_list, cell, html_page, html_text, table
from sonde.render.html.svg_chart import ChartLine, line_chart

HEADLINES = {"identical": "Identical", "alike": "Alike", "different": "Different", "unknown": "No verdict"}


def comparison_html(comparison: RunComparison) -> str:
    return html_page(f"{comparison.a.run.name} · {comparison.b.run.name}", "".join(_parts(comparison)))


def _parts(comparison: RunComparison) -> Iterator[str]:
    yield f'<h1><span class="verdict {comparison.verdict}">{HEADLINES[comparison.verdict]}</span></h1>'
    yield f"<p><b>{html_text(comparison.headline)}</b></p>"
    yield "".join(f"<p>{html_text(text)}</p>" for text in comparison.details)
    names = (("A", comparison.a.run.name), ("B", comparison.b.run.name))
    yield f'<p class="story">{"<br>".join(f"{_key(letter)} {html_text(name)}" for letter, name in names)}</p>'
    yield from (_losses(one) for one in comparison.losses)
    yield from (_table(each) for each in comparison_tables(comparison))
    if notes := comparison_notes(comparison):
        yield f"<h2>What was compared</h2>{bullet_list(notes)}"


def _key(letter: str) -> str:
    return f'<span class="key {letter.lower()}">{letter}</span>'


def _losses(one: LossComparison) -> str:
    lines = []
    for letter, windows in (("A", one.curve_a), ("B", one.curve_b)):
        middles, medians = [(window.first + window.last) // 2 for window in windows], [window.median for window in windows]
        bands = [window.low for window in windows], [window.high for window in windows]
        lines.append(ChartLine(middles, medians, letter.lower(), letter, *bands))
    drawing = line_chart(lines, name=one.series)
    caption = f"{html_text(one.series)} by step: medians of windows of steps, and what four in five steps lie in. {_key('A')} {_key('B')}"
    return f"<figure><figcaption>{caption}</figcaption>{drawing}</figure>" if drawing else ""


def _table(shown: ComparisonTable) -> str:
    rows = [
        [cell(text, css_class="loud" if index in shown.notable and column == 3 else "") for column, text in enumerate(row)]
        for index, row in enumerate(shown.rows)
    ]
    return f"<h2>{html_text(shown.title)}</h2>{table(('', _key('A'), _key('B'), ''), rows, css_class='table sides')}"

"""Two runs side by side as one self-contained page: the verdict, both losses in one picture, and every table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sonde.views.chart import Line, curves
from sonde.views.compare_rows import ComparisonTable, common, tables
from sonde.views.sheet import html_text, sheet

if TYPE_CHECKING:
    from sonde.comparison.compare import RunComparison
    from sonde.comparison.curves import LossComparison, Window

HEADLINES = {"identical": "Identical", "alike": "Alike", "different": "Different", "unknown": "Nothing could be told"}


def document(comparison: RunComparison) -> str:
    """One page about two runs."""
    title = f"{comparison.a.run.name} · {comparison.b.run.name}"
    return sheet(title, "".join(_parts(comparison)))


def _parts(comparison: RunComparison) -> Iterator[str]:
    yield f'<h1><span class="verdict {comparison.verdict}">{HEADLINES[comparison.verdict]}</span></h1>'
    yield f"<p><b>{html_text(comparison.headline)}</b></p>"
    yield "".join(f"<p>{html_text(text)}</p>" for text in comparison.details)
    names = (("A", comparison.a.run.name), ("B", comparison.b.run.name))
    yield f'<p class="story">{"<br>".join(f"{_key(letter)} {html_text(name)}" for letter, name in names)}</p>'
    yield from (_losses(one) for one in comparison.losses)
    yield from (_table(table) for table in tables(comparison))
    notes = [common(comparison.parting)] if comparison.parting is not None else []
    notes += comparison.notes
    if notes:
        yield f'<h2>What was compared</h2><ul class="plain">{"".join(f"<li>{html_text(note)}</li>" for note in notes)}</ul>'


def _key(letter: str) -> str:
    return f'<span class="key {letter.lower()}">{letter}</span>'


def _losses(one: LossComparison) -> str:
    lines = [_line(windows, letter) for letter, windows in (("A", one.curve_a), ("B", one.curve_b))]
    drawing = curves(lines, name=one.series)
    caption = f"{html_text(one.series)} by step: medians of windows of steps, and what four in five steps lie in. {_key('A')} {_key('B')}"
    return f"<figure><figcaption>{caption}</figcaption>{drawing}</figure>" if drawing else ""


def _line(windows: tuple[Window, ...], letter: str) -> Line:
    middles = [(window.first + window.last) // 2 for window in windows]
    bands = [window.low for window in windows], [window.high for window in windows]
    return Line(middles, [window.median for window in windows], letter.lower(), letter, *bands)


def _table(table: ComparisonTable) -> str:
    rows = "".join(
        "<tr>" + "".join(_cell(cell, loud=place in table.bad and column == 3) for column, cell in enumerate(row)) + "</tr>"
        for place, row in enumerate(table.rows)
    )
    head = f"<tr><th></th><th>{_key('A')}</th><th>{_key('B')}</th><th></th></tr>"
    return (
        f'<h2>{html_text(table.title)}</h2><div class="table sides"><table><thead>{head}</thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell(text: str, *, loud: bool) -> str:
    return f"<td{' class=loud' if loud else ''}>{html_text(text)}</td>"

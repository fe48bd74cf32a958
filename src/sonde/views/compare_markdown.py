"""Two runs side by side as Markdown, for an issue, a chat or a pull request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sonde.rules.words import number
from sonde.views.compare_rows import common, tables
from sonde.views.markdown import cell, code, text
from sonde.views.sparkline import sparkline

if TYPE_CHECKING:
    from sonde.comparison.compare import RunComparison


def render(comparison: RunComparison) -> str:
    """The comparison as one Markdown document."""
    return "\n".join(_lines(comparison)) + "\n"


def _lines(comparison: RunComparison) -> Iterator[str]:
    yield f"# Sonde: {comparison.verdict}"
    yield ""
    yield f"**{text(comparison.headline)}**"
    for sentence in comparison.details:
        yield ""
        yield text(sentence)
    for one in comparison.losses:
        for letter, curve in (("A", one.curve_a), ("B", one.curve_b)):
            medians = [window.median for window in curve]
            if medians:
                yield ""
                yield f"{text(one.series)} {letter} {number(medians[0])} {code(sparkline(medians))} {number(medians[-1])}"
    for table in tables(comparison):
        yield ""
        yield f"| {cell(table.title)} | A | B | |"
        yield "|---|---|---|---|"
        for row in table.rows:
            yield "| " + " | ".join(cell(each) for each in row) + " |"
    notes = [common(comparison.parting)] if comparison.parting is not None else []
    for note in (*notes, *comparison.notes):
        yield ""
        yield text(note)

"""Many pictures on one page that needs nothing else: no script, no file beside it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sonde.views.numbers import counted
from sonde.views.plots.plot import Plot
from sonde.views.sheet import html_text, sheet

log = logging.getLogger("sonde")


def dashboard(plots: Sequence[Plot], *, title: str = "Pictures") -> str:
    """The page. A picture that cannot be drawn is said to be so in its place."""
    contents = "".join(f'<li><a href="#plot{number}">{html_text(plot.title)}</a></li>' for number, plot in enumerate(plots, 1))
    head = f'<h1>{html_text(title)}</h1><p class="story">{counted(len(plots), "picture")}</p>'
    if len(plots) > 1:
        head += f'<nav><ul class="plain">{contents}</ul></nav>'
    return sheet(title, head + "".join(_section(number, plot) for number, plot in enumerate(plots, 1)))


def _section(number: int, plot: Plot) -> str:
    try:
        drawing = plot.to_html()
    except Exception as error:  # a plot of somebody else's: one bad picture must not cost the others
        log.warning("sonde: the plot %r could not be drawn: %s", plot.name, error)
        drawing = f'<figure class="plot">This picture could not be drawn: {html_text(error)}</figure>'
    return f'<section id="plot{number}" class="picture">{drawing}</section>'

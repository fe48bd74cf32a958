"""A plot with the numbers that it shows; it is drawn when it is displayed or saved. Also many plots on one HTML page."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonde.errors import SondeError
from sonde.formatting import counted, printable, strict_json
from sonde.render.html.html_page import html_page, html_text
from sonde.render.plots import style
from sonde.render.safe_write import replace_file, require_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("sonde")

FORMATS = ("png", "svg", "pdf", "html", "json")
DPI = 150
# Without these a file would differ each time it is written.
METADATA: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
GROUP_ID = re.compile(r'(<g) id="[A-Za-z0-9.]+_\d+"')
CSS_VARIABLES = {
    style.TEXT: "var(--ink)", style.GRAY: "var(--soft)", style.GRID: "var(--line)", style.BACKGROUND: "var(--card)",
    style.BAD: "var(--error)",
}  # fmt: skip


class Plot:
    """A named plot with the numbers that it shows, without the tensors and arrays that it was made from."""

    def __init__(
        self, name: str, draw: Callable[[Figure], None], *, data: Mapping[str, Any], title: str = "", size: tuple[float, float] = (6.4, 3.6)
    ) -> None:
        self.name, self.title, self.size = name, title or name, size
        self._data, self._draw = dict(data), draw
        self._figure: Figure | None = None

    @property
    def data(self) -> dict[str, Any]:
        """The numbers that the plot shows, in lists."""
        return {key: _plain(value) for key, value in self._data.items()}

    @property
    def figure(self) -> Figure:
        """The matplotlib figure, to change before it is saved. Its axes run from 0 to 1: ticks carry the numbers."""
        if self._figure is None:
            with style.plot_style(self.name):
                self._figure = self._drawn()
        return self._figure

    def save(self, path: str | Path, *, dpi: int = DPI) -> Path:
        """Write the plot; the suffix names the format: .png, .svg, .pdf, .html or .json (the data)."""
        target = require_path(path)
        kind = target.suffix.lower().removeprefix(".")
        if kind not in FORMATS:
            reason = f"{kind!r} is no format of pictures" if kind else "it has no suffix"
            raise SondeError(f"{printable(target)}: {reason}. Use one of .{', .'.join(FORMATS)}.")
        return replace_file(target, self.render(kind, dpi=dpi))

    def render(self, kind: str, *, dpi: int = DPI) -> bytes:
        """The file in one of the formats, as bytes; the same bytes each time."""
        if kind == "json":
            return self.to_json().encode("utf-8", "backslashreplace")
        if kind == "html":
            return html_page(self.title, self.to_html()).encode("utf-8", "backslashreplace")
        file = io.BytesIO()
        with style.plot_style(self.name):
            figure = self._figure or self._drawn()
            figure.savefig(file, format=kind, dpi=dpi, metadata=METADATA[kind])
        return file.getvalue()

    def to_json(self) -> str:
        """The numbers that the plot shows, as strict JSON: "NaN", "Infinity" and "-Infinity" are strings."""
        return strict_json({"name": self.name, "title": self.title, **self.data}) + "\n"

    def to_html(self) -> str:
        """A <figure> for a page that has the style of Sonde's pages: light and dark."""
        drawing = self._svg()
        for color, variable in CSS_VARIABLES.items():
            drawing = drawing.replace(color, variable)
        return f'<figure class="plot">{drawing}</figure>'

    def _repr_html_(self) -> str:
        # A notebook may be dark and does not define our CSS variables, so the plot has its own background.
        wide = int(self.size[0] * 110)
        return f'<div style="max-width:{wide}px;background:{style.BACKGROUND};padding:8px;border-radius:6px">{self._svg()}</div>'

    def _svg(self) -> str:
        """The <svg> element, for a place inside HTML."""
        text = self.render("svg").decode()
        text = GROUP_ID.sub(r"\1", text[text.index("<svg") :])  # the same numbers in every plot of a page, and nothing refers to them
        return text.replace("<svg", f'<svg role="img" aria-label="{html_text(self.title)}"', 1)

    def _drawn(self) -> Figure:
        figure = style.empty_figure(self.size)
        self._draw(figure)
        return figure

    def __repr__(self) -> str:
        return f"Plot({self.name!r})"


def plots_page(plots: Sequence[Plot], *, title: str = "Pictures") -> str:
    """Many plots on one self-contained HTML page. Where a plot cannot be drawn, the page shows the error in its place."""
    contents = "".join(f'<li><a href="#plot{number}">{html_text(plot.title)}</a></li>' for number, plot in enumerate(plots, 1))
    head = f'<h1>{html_text(title)}</h1><p class="story">{counted(len(plots), "picture")}</p>'
    if len(plots) > 1:
        head += f'<nav><ul class="plain">{contents}</ul></nav>'
    return html_page(title, head + "".join(_section(number, plot) for number, plot in enumerate(plots, 1)))


def _section(number: int, plot: Plot) -> str:
    try:
        drawing = plot.to_html()
    except Exception as error:  # the drawing function may be the user's: one bad plot must not cost the others
        log.warning("sonde: the plot %r could not be drawn: %s", plot.name, error)
        drawing = f'<figure class="plot">This picture could not be drawn: {html_text(error)}</figure>'
    return f'<section id="plot{number}" class="picture">{drawing}</section>'


def _plain(value: Any) -> Any:
    """Arrays as lists, also inside mappings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value

"""One picture: the numbers that it shows, and how to draw them. It is drawn when somebody looks or saves."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonde.errors import SondeError
from sonde.report import strict
from sonde.views.file import write_new
from sonde.views.plots import ink
from sonde.views.printable import printable
from sonde.views.sheet import html_text, sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf", "html", "json")
DPI = 150
# Without these a file would differ each time it is written.
METADATA: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
GROUP_ID = re.compile(r'(<g) id="[A-Za-z0-9.]+_\d+"')
VARIABLES = {ink.INK: "var(--ink)", ink.SOFT: "var(--soft)", ink.LINE: "var(--line)", ink.PAPER: "var(--card)", ink.BAD: "var(--error)"}


class Plot:
    """A picture with a name. The tensors and arrays that it was made from are not kept, only the numbers that it shows."""

    def __init__(
        self,
        name: str,
        draw: Callable[[Figure], None],
        *,
        data: Mapping[str, Any],
        title: str = "",
        size: tuple[float, float] = (6.4, 3.6),
    ) -> None:
        self.name, self.title, self.size = name, title or name, size
        self._data, self._draw = dict(data), draw
        self._figure: Figure | None = None

    @property
    def data(self) -> dict[str, Any]:
        """What the picture shows, in lists and plain numbers."""
        return {key: _plain(value) for key, value in self._data.items()}

    @property
    def figure(self) -> Figure:
        """The matplotlib figure, to change before it is saved. Its axes run from 0 to 1: ticks carry the numbers."""
        if self._figure is None:
            with ink.house_style(self.name):
                self._figure = self._drawn()
        return self._figure

    def save(self, path: str | Path, *, dpi: int = DPI) -> Path:
        """Write the picture; the suffix names the format: .png, .svg, .pdf, .html or .json (the data)."""
        target = Path(path)
        kind = target.suffix.lower().removeprefix(".")
        if kind not in FORMATS:
            said = f"{kind!r} is no format of pictures" if kind else "it has no suffix"
            raise SondeError(f"{printable(target)}: {said}. Use one of .{', .'.join(FORMATS)}.")
        content = self.render(kind, dpi=dpi)
        make_folder(target.parent)
        write_new(target, content, replace=True)
        return target

    def render(self, kind: str, *, dpi: int = DPI) -> bytes:
        """The file in one of the formats, as bytes; the same bytes each time."""
        if kind == "json":
            return self.to_json().encode("utf-8", "backslashreplace")
        if kind == "html":
            return sheet(self.title, self.to_html()).encode("utf-8", "backslashreplace")
        file = io.BytesIO()
        with ink.house_style(self.name):
            figure = self._figure or self._drawn()
            figure.savefig(file, format=kind, dpi=dpi, metadata=METADATA[kind])
        return file.getvalue()

    def to_json(self) -> str:
        """What the picture shows, as strict JSON: "NaN", "Infinity" and "-Infinity" are strings."""
        return json.dumps(strict({"name": self.name, "title": self.title, **self.data}), indent=1, allow_nan=False) + "\n"

    def to_html(self) -> str:
        """A <figure> for a page that has the style of Sonde's pages: light and dark."""
        drawing = self._svg()
        for colour, variable in VARIABLES.items():
            drawing = drawing.replace(colour, variable)
        return f'<figure class="plot">{drawing}</figure>'

    def _repr_html_(self) -> str:
        # A notebook may be dark and has none of our variables: the picture brings its own paper.
        wide = int(self.size[0] * 110)
        return f'<div style="max-width:{wide}px;background:{ink.PAPER};padding:8px;border-radius:6px">{self._svg()}</div>'

    def _svg(self) -> str:
        """The <svg> element, for a place inside HTML."""
        text = self.render("svg").decode()
        text = text[text.index("<svg") :]
        text = GROUP_ID.sub(r"\1", text)  # numbered in every picture alike, and nothing refers to them
        return text.replace("<svg", f'<svg role="img" aria-label="{html_text(self.title)}"', 1)

    def _drawn(self) -> Figure:
        figure = ink.empty_figure(self.size)
        self._draw(figure)
        return figure

    def __repr__(self) -> str:
        return f"Plot({self.name!r})"


def _plain(value: Any) -> Any:
    """Arrays as lists, also inside mappings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def make_folder(folder: Path) -> None:
    """A folder to write into, with all above it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise SondeError(f"{printable(folder)} cannot be made: {reason}.\nGive a folder that you may write to.") from None

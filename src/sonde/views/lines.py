"""Lines of text with a hanging indent.

Rich pads what it lays out with blanks up to the margin; a log file or a diff should not have them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.text import Text

from sonde.views.printable import printable

Part = tuple[str, str]  # text and style; a view says which text is whose, so everything is made printable here


def line(*parts: Part | str) -> Text:
    """One line of styled parts. Nothing in them is read as markup, nothing in them can command the terminal."""
    text = Text()
    for part in parts:
        content, style = part if isinstance(part, tuple) else (part, "")
        text.append(printable(content), style)
    return text


def paragraph(content: str, width: int, *, label: Part = ("", ""), indent: int = 0, style: str = "") -> Iterator[Text]:
    """`content` wrapped to `width` behind a label that stands to the left of the first line."""
    room = max(width - indent, 10)
    for given in printable(content, lines=True).split("\n"):
        for piece in textwrap.wrap(given, room, break_on_hyphens=False) or [""]:
            yield line((label[0].ljust(indent), label[1]), (piece, style))
            label = ("", "")

"""The console that commands print on, and lines of text with a hanging indent."""

import io
import re
import textwrap
from collections.abc import Iterator
from typing import IO, NoReturn

from rich.console import Console
from rich.text import Text

from sonde.formatting import printable

WIDEST = 100  # characters; longer lines are hard to follow
Part = tuple[str, str]  # text and style

BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|ms|s|[kMG]B)(?!\w))")
UNBROKEN = "\N{NO-BREAK SPACE}"  # textwrap breaks at no other blank than the ASCII ones


class Terminal(Console):
    """A rich console without markup and no wider than `widest`, that raises BrokenPipeError where rich would end the process."""

    def __init__(self, file: IO[str], *, widest: int = WIDEST) -> None:
        super().__init__(file=file, highlight=False, markup=False, emoji=False)
        self.width = min(self.width, widest) if self.is_terminal else WIDEST

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def plain_text(renderable: object, width: int) -> str:
    """What a console of `width` characters without colors would show."""
    file = io.StringIO()
    Console(file=file, width=width, no_color=True, highlight=False, markup=False, emoji=False, legacy_windows=False).print(renderable)
    return file.getvalue().rstrip("\n")


def line(*parts: Part | str) -> Text:
    """One line of styled parts. They are made printable here and not read as markup, so untrusted text may be in them."""
    text = Text()
    for part in parts:
        content, style = part if isinstance(part, tuple) else (part, "")
        text.append(printable(content), style)
    return text


def paragraph(content: str, width: int, *, label: Part = ("", ""), indent: int = 0, style: str = "") -> Iterator[Text]:
    """`content` wrapped to `width`, with a label to the left of its first line; a number stays with its unit.

    Wrapped here and not by rich, which pads lines with blanks up to the margin: a log file or a diff should not have them.
    """
    room = max(width - indent, 10)
    for given in printable(content, lines=True).split("\n"):
        for piece in textwrap.wrap(BEFORE_UNIT.sub(UNBROKEN, given), room, break_on_hyphens=False) or [""]:
            yield line((label[0].ljust(indent), label[1]), (piece.replace(UNBROKEN, " "), style))
            label = ("", "")

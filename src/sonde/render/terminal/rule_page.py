"""The page of a rule, from its docstring: a sentence, then sections that start with their name and two blanks."""

import inspect
import re
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult

from sonde.render.terminal.print_to_terminal import line, paragraph

SECTION = re.compile(r"(?P<name>\S+(?: \S+)*)\s{2,}(?P<text>\S.*)")


def sections(docstring: str) -> tuple[str, list[tuple[str, str]]]:
    """The opening sentence, and (name, text) of each section."""
    opening: list[str] = []
    found: list[tuple[str, list[str]]] = []
    for row in inspect.cleandoc(docstring).splitlines():
        start = SECTION.fullmatch(row)
        if start:
            found.append((start["name"], [start["text"]]))
        elif row.strip():
            (found[-1][1] if found else opening).append(row.strip())
    return " ".join(opening), [(name, " ".join(text)) for name, text in found]


class RulePage:
    """One rule: its name, its docstring, and the rules whose findings it explains."""

    def __init__(self, name: str, docstring: str, explains: Sequence[str] = ()) -> None:
        self.name, self.docstring, self.explains = name, docstring, tuple(explains)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        opening, parts = sections(self.docstring)
        if self.explains:
            parts = [*parts, ("Explains", ", ".join(self.explains))]
        yield line((self.name, "bold cyan"))
        yield from paragraph(opening, options.max_width, style="bold")
        indent = max((len(name) for name, _ in parts), default=0) + 3
        for name, text in parts:
            yield line()
            yield from paragraph(text, options.max_width, label=(name, "cyan"), indent=indent)


class RuleIndex:
    """All rules, each with the opening sentence of its page."""

    def __init__(self, rows: Sequence[tuple[str, str]]) -> None:
        self.rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = max((len(name) for name, _ in self.rows), default=0) + 2
        for name, docstring in self.rows:
            yield from paragraph(sections(docstring)[0], options.max_width, label=(name, "cyan"), indent=indent)

"""The checklist that `sonde doctor` prints: name, state and text of each check."""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult

from sonde.render.terminal.print_to_terminal import paragraph

MARKS = {"good": ("✓", "ok", "green"), "note": ("•", "--", "yellow"), "bad": ("✗", "NO", "bold red")}


class Checklist:
    """Rows of (name, state, text)."""

    def __init__(self, rows: Sequence[tuple[str, str, str]]) -> None:
        self.rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = max((len(name) for name, _, _ in self.rows), default=0) + 5
        for name, state, text in self.rows:
            mark, plain, style = MARKS[state]
            label = f"{plain if options.ascii_only else mark:<2} {name}"
            yield from paragraph(text, options.max_width, label=(label, style), indent=indent)

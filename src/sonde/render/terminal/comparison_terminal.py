"""A comparison of two runs for a terminal: the verdict, both losses, then tables of what differs."""

from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from sonde.comparison.compare import RunComparison
from sonde.comparison.loss_curves import LossComparison
from sonde.formatting import number, printable
from sonde.render.comparison_content import ComparisonTable, common_steps, comparison_tables
from sonde.render.terminal.print_to_terminal import line, paragraph
from sonde.render.terminal.sparkline import sparkline

MARKS = {
    "identical": ("=", "=", "bold green"), "alike": ("≈", "~", "bold green"), "different": ("≠", "!=", "bold red"),
    "unknown": ("?", "?", "bold yellow"),
}  # fmt: skip
INDENT = 14
GAP = 2
CURVE_WIDTH = 48


class TerminalComparison:
    """A comparison of two runs for a rich console."""

    def __init__(self, comparison: RunComparison) -> None:
        self.comparison = comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        comparison, width = self.comparison, options.max_width
        mark, plain, style = MARKS[comparison.verdict]
        label = f"{plain if options.ascii_only else mark} {comparison.verdict}"
        yield from paragraph(comparison.headline, width, label=(label, style), indent=INDENT, style="bold")
        for text in comparison.details:
            yield from paragraph(text, width, indent=INDENT)
        if common := common_steps(comparison):
            yield from paragraph(common, width, label=("compared", "dim"), indent=INDENT, style="dim")
        for text in comparison.notes:
            yield from paragraph(text, width, label=("note", "dim"), indent=INDENT, style="dim")
        for one in comparison.losses:
            yield from _curves(one, options)
        for table in comparison_tables(comparison):
            yield line()
            yield from _table(table, width)


def _curves(one: LossComparison, options: ConsoleOptions) -> Iterator[Text]:
    """Both losses by their own steps, each on its own scale; the table has the numbers."""
    yield line()
    for name, medians in (("A", [window.median for window in one.curve_a]), ("B", [window.median for window in one.curve_b])):
        if not medians:
            continue
        first, last = number(medians[0]), number(medians[-1])
        room = options.max_width - INDENT - len(first) - len(last) - 2
        drawn = sparkline(medians, max(min(CURVE_WIDTH, room), 4), ascii_only=options.ascii_only)
        yield line((f"{one.series} {name}".ljust(INDENT), "dim"), f"{first} ", (drawn, "cyan" if name == "A" else "yellow"), f" {last}")


def _table(table: ComparisonTable, width: int) -> Iterator[Text]:
    """In columns where they fit; else each row as a paragraph per run."""
    rows = [tuple(printable(cell) for cell in row) for row in table.rows]
    head = (table.title, "A", "B", "")
    widths = [max(cell_len(row[column]) for row in (head, *rows)) for column in range(4)]
    styles = ["bold yellow" if place in table.notable else "dim" for place in range(len(rows))]
    if sum(widths) + 3 * GAP <= width:
        yield line((_columns(head, widths).rstrip(), "bold"))
        for row, style in zip(rows, styles):
            front = _columns(row[:3], widths)
            yield line(front, (row[3], style)) if row[3] else line(front.rstrip())
        return
    yield line((table.title, "bold"))
    indent = min(max(widths[0], 4) + GAP, 26) + GAP
    for (name, a, b, difference), style in zip(rows, styles):
        label = (f"  {name}", "")
        if cell_len(name) + 2 >= indent:
            yield line(label)
            label = ("", "")
        yield from paragraph(f"A  {a}", width, label=label, indent=indent)
        yield from paragraph(f"B  {b}", width, indent=indent)
        if difference:
            yield from paragraph(f"   {difference}", width, indent=indent + 3, style=style)


def _columns(cells: tuple[str, ...], widths: list[int]) -> str:
    return "".join(cell + " " * (width - cell_len(cell) + GAP) for cell, width in zip(cells, widths))

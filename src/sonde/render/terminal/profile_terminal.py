"""A profile for a terminal: the step and its phases, the tree of layers with their shares, advice; and two profiles compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from sonde.formatting import DASH, counted, factor, milliseconds, printable, si_number, whole_percent
from sonde.render.profile_content import LATENCY_HEAD, SECTION_HEAD, advice, latencies, outside_layers, phases, profile_facts, sections
from sonde.render.profile_tree import LayerNode, finite, rows
from sonde.render.terminal.print_to_terminal import WIDEST, Part, line, paragraph, plain_text
from sonde.render.terminal.sparkline import bar

if TYPE_CHECKING:
    from sonde.profiler import LayerChange, ProfileComparison, ProfileReport, TimeSpread

MAX_ROWS = 40  # of the tree: what one screen and a half hold
NAME_WIDTH = (26, 56)  # at least, at most
BAR_WIDTH = 10
HOT, WARM = 0.20, 0.05  # shares of the step that a layer takes itself, for its color
INDENT = 12
VERDICTS = {"slower": "bold red", "faster": "bold green", "new": "yellow", "gone": "yellow", "could not tell": "dim"}


class TerminalProfile:
    """A profile for a rich console."""

    def __init__(self, report: ProfileReport) -> None:
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report, width = self.report, min(options.max_width, WIDEST)  # of text; the tree may be wider
        for name, text in profile_facts(report):
            yield from paragraph(text, width, label=(name, "bold cyan" if name == "profile" else "dim"), indent=INDENT)
        if report.phases:
            yield line()
            yield from _phases(report, options)
        if report.layers:
            yield line()
            yield from _tree(report, options)
            if text := outside_layers(report):
                yield line()
                yield from paragraph(text, width, label=("in no layer", "dim"), indent=INDENT, style="dim")
        rows, left_out = latencies(report)
        if rows:
            yield line()
            yield from _table(LATENCY_HEAD, rows, options)
            if left_out:
                yield line((left_out, "dim"))
        if report.sections:
            yield line()
            yield from _table(SECTION_HEAD, sections(report), options)
        for (name, style), texts in zip((("slow", "bold red"), ("try", "green"), ("note", "dim")), advice(report)):
            if texts:
                yield line()
            for place, text in enumerate(texts):
                label = (name if place == 0 else "", style)
                yield from paragraph(text, width, label=label, indent=INDENT, style=style if style == "dim" else "")


class TerminalProfileComparison:
    """Two profiles side by side for a rich console."""

    def __init__(self, comparison: ProfileComparison) -> None:
        self.comparison = comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        comparison, width = self.comparison, min(options.max_width, WIDEST)
        yield from paragraph(comparison.sentence, width, label=("compared", "bold cyan"), indent=INDENT, style="bold")
        yield line()
        yield from _changes([comparison.step, *comparison.phases], options, "phase")
        shown, left_out = shown_changes(comparison, MAX_ROWS)
        if shown:
            yield line()
            yield from _changes(shown, options, "layer")
        if left_out:
            yield line((left_out, "dim"))
        for note in comparison.notes:
            yield from paragraph(note, width, label=("note", "yellow"), indent=INDENT)


def profile_text(report: ProfileReport, *, width: int = 80) -> str:
    return plain_text(TerminalProfile(report), width)


def comparison_text(comparison: ProfileComparison, *, width: int = 80) -> str:
    return plain_text(TerminalProfileComparison(comparison), width)


def shown_changes(comparison: ProfileComparison, limit: int) -> tuple[list[LayerChange], str]:
    """The layers to show: those that changed, and, where few did, the most expensive of the others; and what is left out, in words."""
    every = comparison.grouped
    by_cost = sorted(every, key=lambda one: (not one.is_change, -finite(one.after.median_ms)))
    num_changed = sum(one.is_change for one in every)
    shown = {id(one) for one in by_cost[: min(max(num_changed, limit // 2), limit)]}
    hidden = [one for one in every if id(one) not in shown]
    changed = sum(one.is_change for one in hidden)
    left_out = f"{counted(len(hidden), 'more row')}, {changed or 'none'} of them changed" if hidden else ""
    return [one for one in every if id(one) in shown], left_out


def _phases(report: ProfileReport, options: ConsoleOptions) -> Iterator[Text]:
    known = phases(report)
    width = max(cell_len(name) for name, *_ in known)
    wide = min(max(options.max_width - width - 34, BAR_WIDTH), 36)
    for name, spread, share in known:
        yield line(
            (f"{name.ljust(width)}  ", ""), (f"{milliseconds(spread.median_ms):>8} ms ", "bold"), (f"{_range(spread):<14}", "dim"),
            (bar(share, wide, ascii_only=options.ascii_only).ljust(wide), "cyan"), f" {whole_percent(share):>5}",
        )  # fmt: skip


def _range(spread: TimeSpread) -> str:
    if spread.num < 2:
        return ""
    low, high = milliseconds(spread.low_ms), milliseconds(spread.high_ms)
    return f"{low}–{high}" if low != high else ""


class TreeColumn(NamedTuple):
    head: str
    width: int
    cell: Callable[[LayerNode], str]
    rank: int  # columns with a high rank are left out first where there is no room; 0 always stays, -1 has nothing to show


def _tree(report: ProfileReport, options: ConsoleOptions) -> Iterator[Text]:
    shown = rows(report, MAX_ROWS)
    labels = [_label(node, lasts, options.ascii_only) for node, lasts in shown]
    columns, name_width = _columns(report, options, max(cell_len("".join(text for text, _ in label)) for label in labels))
    yield line((_fitted("layer", name_width), "dim"), *((f" {column.head:>{column.width}}", "dim") for column in columns))
    for (node, _), label in zip(shown, labels):
        share = report.share(node.self_ms)
        heat = "dim" if node.num_folded else "bold red" if share >= HOT else "yellow" if share >= WARM else ""
        styles = {"": "cyan", "self": heat}  # by the head of the column
        cells = [(f" {column.cell(node):>{column.width}}", styles.get(column.head, "")) for column in columns]
        yield line(*_cut(label, name_width), *cells)


def _columns(report: ProfileReport, options: ConsoleOptions, longest: int) -> tuple[list[TreeColumn], int]:
    """The columns that have something to show and fit, in their order, and the room for names."""
    peak = report.peak_flops_per_s
    backward = any(layer.backward.is_known for layer in report.layers)
    flops = any(layer.flops_forward for layer in report.layers)
    memory = any(layer.memory_bytes for layer in report.layers)
    every = [
        TreeColumn("forward", 8, lambda node: milliseconds(node.forward_ms), 0),
        TreeColumn("backward", 8, lambda node: milliseconds(node.backward_ms), 0 if backward else -1),
        TreeColumn("self", 7, lambda node: milliseconds(node.self_ms), 0),
        TreeColumn("±", 5, _relative_spread, 3),
        TreeColumn("share", 6, lambda node: whole_percent(report.share(node.total_ms)), 0),
        TreeColumn("", BAR_WIDTH, lambda node: _share_bar(report, node, options), 4),
        TreeColumn("FLOP", 7, lambda node: si_number(node.flops) if node.flops else DASH, 5 if flops else -1),
        TreeColumn("of peak", 8, lambda node: _of_peak(node, peak), 2 if flops and peak > 0 else -1),
        TreeColumn("memory", 8, lambda node: si_number(node.memory_bytes, "B") if node.memory_bytes else DASH, 1 if memory else -1),
        TreeColumn("calls", 6, lambda node: f"{node.calls:g}", 6),
        TreeColumn("source", 18, lambda node: _fitted(node.source, 18), 7 if any(layer.source for layer in report.layers) else -1),
    ]
    columns = [column for column in every if column.rank == 0]
    name_width = min(max(longest, NAME_WIDTH[0]), NAME_WIDTH[1])
    for column in sorted((column for column in every if column.rank > 0), key=lambda column: column.rank):
        least = NAME_WIDTH[0] if column.rank <= 4 else min(name_width, 36)
        if least + sum(each.width + 1 for each in (*columns, column)) <= options.max_width:
            columns.append(column)
    columns.sort(key=every.index)
    room = options.max_width - sum(column.width + 1 for column in columns)
    return columns, max(min(name_width, room), 8)


def _share_bar(report: ProfileReport, node: LayerNode, options: ConsoleOptions) -> str:
    return bar(report.share(node.total_ms), BAR_WIDTH, ascii_only=options.ascii_only).ljust(BAR_WIDTH)


def _relative_spread(node: LayerNode) -> str:
    """Half of the width of the middle half of the times, as a share of the layer's time."""
    share = node.spread_ms / node.total_ms if node.total_ms > 0 else math.nan
    return ">100%" if share > 1 else whole_percent(share)


def _of_peak(node: LayerNode, peak: float) -> str:
    return whole_percent(node.flops / node.total_ms * 1e3 / peak) if node.flops and node.total_ms > 0 else DASH


def _label(node: LayerNode, lasts: Sequence[bool], ascii_only: bool) -> list[Part]:
    """`│  ├─ layers.0–11 Block ×12`"""
    bar, branch, end = ("|  ", "|- ", "`- ") if ascii_only else ("│  ", "├─ ", "└─ ")
    lead = "".join("   " if last else bar for last in lasts[1:-1]) + ((end if lasts[-1] else branch) if len(lasts) > 1 else "")
    if node.num_folded:
        return [(lead, "dim"), (node.name, "dim")]
    many = f" {'x' if ascii_only else '×'}{node.num}" if node.num > 1 else ""
    kind = f" {node.kind}" if node.kind != node.name else ""
    name = node.name.replace("–", "-").replace("…", "..") if ascii_only else node.name
    return [(lead, "dim"), (name, "bold"), (kind, "dim"), (many, "yellow")]


def _cut(label: Sequence[Part], width: int) -> list[Part]:
    """The parts of a label in exactly `width` cells: the class is shortened before the name, the name at its start."""
    parts = [(printable(text), style) for text, style in label]
    excess = sum(cell_len(text) for text, _ in parts) - width
    for place in (2, 1):
        if excess > 0 and place < len(parts):
            text, style = parts[place]
            keep = max(cell_len(text) - excess, 0 if place == 2 else 4)
            cut = (_fitted(text, keep) if place == 2 else f"…{text[-keep + 1 :]}") if keep > 1 else ""
            excess -= cell_len(text) - cell_len(cut)
            parts[place] = (cut, style)
    if excess > 0:
        return [(_fitted("".join(text for text, _ in parts), width), "")]
    return [*parts, (" " * -excess, "")]


def _fitted(text: str, width: int, *, at_end: bool = True) -> str:
    """Text in `width` cells, cut at its end or at its start: the end of a path distinguishes layers."""
    text = printable(text)
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, max(width - 1, 0)) + "…" if at_end else "…" + text[-(width - 1) :]


def _table(head: Sequence[str], body: Sequence[Sequence[str]], options: ConsoleOptions) -> Iterator[Text]:
    widths = [max(cell_len(printable(row[i])) for row in (head, *body)) for i in range(len(head))]
    widths[0] = min(widths[0], max(options.max_width - sum(widths[1:]) - 2 * len(widths), 10))
    for number, row in enumerate((head, *body)):
        cells = "".join(f"  {printable(cell):>{width}}" for cell, width in zip(row[1:], widths[1:]))
        yield line((_fitted(row[0], widths[0]) + cells, "dim" if number == 0 else ""))


def _changes(changes: Sequence[LayerChange], options: ConsoleOptions, what: str) -> Iterator[Text]:
    fixed = 8 + 16 + 8 + 16 + 7 + 12  # widths of the columns; without ranges 2 * 16 less
    compact = options.max_width < NAME_WIDTH[0] + fixed
    names = []
    for one in changes:
        _, times, number = one.kind.rpartition(" ×")  # `Linear ×4`: a row for several layers
        names.append(f"{one.path or '(the model)'}{times}{number if times else ''}")
    widest = max([cell_len(printable(name)) for name in names] + [len(what)])
    width = max(min(widest, options.max_width - (fixed - 32 if compact else fixed)), 8)
    yield line((f"{_fitted(what, width)}{'before':>8}{'' if compact else ' ' * 16}{'after':>8}", "dim"))
    for name, one in zip(names, changes):
        cells: list[Part] = [(_fitted(name, width, at_end=False), "bold" if one.verdict in ("slower", "faster") else "")]
        for side in (one.before, one.after):
            cells += [(f"{milliseconds(side.median_ms):>8}", ""), ("" if compact else f" {_range(side):<15}", "dim")]
        yield line(*cells, f"{factor(one.ratio):>7}", ("  " + one.verdict, VERDICTS.get(one.verdict, "dim")))



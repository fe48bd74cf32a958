"""A memory report as text or HTML: usage at the peak by category and module, whether it fits, leaks."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import TYPE_CHECKING

from sonde.formatting import counted, percent, printable, shorten, size
from sonde.render.summaries.tables import html_table, text_table

if TYPE_CHECKING:
    from sonde.memory_profiler.memory_report import DeviceMemory, MemoryReport, Usage

MAX_MODULES = 10
MAX_LEAKS = 5
MAX_SNAPSHOTS = 10
BAR = 20  # characters
WIDTH, INDENT = 80, " " * 12
LONGEST_PATH = 34  # characters: with five columns of numbers, 80 are not exceeded
WORDS = {"forward": "in the forward", "backward": "in the backward", "optimizer": "in the optimizer's step"}
ELSEWHERE = "outside of the model and the optimizer"  # where a script makes or loads its data
SHORT = {"parameters": "params", "gradients": "grads", "optimizer state": "optimizer", "activations": "activations", "other": "other"}


def memory_text(report: MemoryReport) -> str:
    parts = []
    for name in sorted(report.devices, key=lambda name: name != report.device):
        device = report.devices[name]
        parts.append("\n".join(wrap(_headline(device), WIDTH, subsequent_indent="  ", break_on_hyphens=False)))
        parts.append(text_table(("category", "at the peak", "share", ""), _categories(device)))
        modules, more = _modules(device)
        if modules:
            parts.append("\n".join([text_table(("module", *SHORT.values()), modules), *more]))
    lines = [wrapped(line) for line in _lines(report)]
    return "\n\n".join([*parts, "\n".join(lines)] if lines else parts)


def wrapped(line: str) -> str:
    """A line of facts after its label, no wider than the table."""
    return "\n".join(wrap(printable(line), WIDTH, subsequent_indent=INDENT, break_on_hyphens=False))


def memory_html(report: MemoryReport) -> str:
    device = report.on()
    modules, more = _modules(device)
    tables = html_table(("category", "at the peak", "share", ""), _categories(device), title=_headline(device))
    return tables + html_table(("module", *SHORT.values()), modules, title="", notes=[*more, *_lines(report)])


def _headline(device: DeviceMemory) -> str:
    peak = device.peak
    where = WORDS.get(peak.phase, "") + (f" of {peak.module}" if peak.module and peak.phase == "forward" else "")
    line = ", ".join(part for part in (peak.operation, peak.source) if part)
    if not where and line:
        where = ELSEWHERE
    text = f"peak of tensors on {device.device}: {size(peak.usage.total)}"
    return printable(text + (f", {where}" if where else "") + (f" ({line})" if line else ""))


def _categories(device: DeviceMemory) -> list[list[str]]:
    found, total = device.peak.usage.by_category(), device.peak.usage.total
    shares = {name: num / max(total, 1) for name, num in found.items()}
    rows = [[name, size(num), percent(shares[name]), "█" * round(BAR * shares[name])] for name, num in found.items()]
    return [*rows, ["total", size(total), "", ""]]


def _modules(device: DeviceMemory) -> tuple[list[list[str]], list[str]]:
    """Rows of the table, and a note on omitted modules."""
    found = device.peak.usage.by_module()
    rows = []
    for path, parts in list(found.items())[:MAX_MODULES]:
        cells = [size(parts[category]) if category in parts else "" for category in SHORT]
        rows.append([shorten(path or "(no module)", LONGEST_PATH), *cells])
    hidden = list(found.values())[MAX_MODULES:]
    total = size(sum(sum(parts.values()) for parts in hidden))
    return rows, [f"and {counted(len(hidden), 'more module')}, {total}"] if hidden else []


def _lines(report: MemoryReport) -> list[str]:
    lines = []
    room, device = report.room, report.on()
    if report.limit is not None and room is not None:
        fits = "fits into" if report.fits() else "does not fit into"
        base = f", of which the program itself takes {size(report.base_rss)}" if report.base_rss else ""
        lines.append(f"machine     it {fits} the {size(report.limit)} of {report.limit_by}{base}")
    largest = report.largest_batch()
    if report.batch_size and largest is not None:
        about = f"about {largest:,} would fit" if largest >= 1 else "not even a batch of 1 would fit"
        lines.append(f"batch       {report.batch_size:,}; {about} (what grows with it in proportion)")
    if device.allocated is not None and device.reserved:
        unused = device.fragmentation or 0.0
        what = "malloc" if device.device == "cpu" else "the allocator"
        more = f"; {size(device.unaccounted)} went to other than tensors since the start" if device.unaccounted is not None else ""
        held = f"handed out {size(device.allocated)} of the {size(device.reserved)} that it holds ({percent(unused)} unused)"
        lines.append(f"allocator   {what} has {held}{more}")
    if report.process.rss is not None:
        most = f", at most {size(report.peak_rss)} so far" if report.peak_rss else ""
        lines.append(f"process     {size(report.process.rss)} in physical memory{most}")
    lines += [f"leak        {leak}" for leak in report.kept[:MAX_LEAKS]]
    if len(report.kept) > MAX_LEAKS:
        lines.append(f"leak        and {len(report.kept) - MAX_LEAKS:,} more: report.leaks()")
    lines += _snapshots(report)
    return [*lines, *(f"note        {note}" for note in report.notes)]


def _snapshots(report: MemoryReport) -> list[str]:
    """The last snapshots; of the earlier ones their number and the largest."""
    hidden, shown = report.snapshots[:-MAX_SNAPSHOTS], report.snapshots[-MAX_SNAPSHOTS:]
    lines = []
    if hidden:
        largest = max(hidden, key=lambda one: sum(usage.total for usage in one.usage.values()))
        most = f"the largest is {largest.label}: {_snapshot(largest.usage)}; report.snapshots has all {len(report.snapshots):,}"
        lines.append(f"snapshot    {counted(len(hidden), 'earlier one')} not shown here, {most}")
    return [*lines, *(f"snapshot    {one.label}: {_snapshot(one.usage)}" for one in shown)]


def _snapshot(usage: Mapping[str, Usage]) -> str:
    return ", ".join(f"{size(one.total)} on {device}" for device, one in usage.items()) or "no tensors"

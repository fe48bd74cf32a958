"""The report on a loop for people: what was detected first, then where time went, memory, gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from sonde.rules.words import listing, number
from sonde.views.numbers import counted, percent
from sonde.views.printable import printable
from sonde.views.quantities import milliseconds
from sonde.views.table import html_table, text_table

WIDTH = 80
NAME = 12
MOST_NOTES = 8  # lines of what was detected
HEAD = ("operation", "calls", "median ms", "p95 ms", "total ms", "share")
LONGEST_NAME = 28  # characters: with the five columns of numbers, 80 are not exceeded


def debug_text(report: Mapping[str, Mapping[str, Any]]) -> str:
    rows = _operations(report)
    if not rows:
        return "nothing recorded: wrap the operations of the loop, for instance with debug_training_step(...)"
    lines = [line for name, said in _facts(report) for line in _hanging(name, said)]
    table = text_table(HEAD, [[row[0][:LONGEST_NAME], *row[1:]] for row in rows])
    notes = _notes(report)
    told = [line for note in notes for line in wrap(f"- {printable(note)}", WIDTH, subsequent_indent="  ")]
    return "\n".join([*lines, *(["", "detected", *told] if told else []), "", table])


def debug_html(report: Mapping[str, Mapping[str, Any]]) -> str:
    rows = _operations(report)
    notes = [f"{name}: {said}" for name, said in _facts(report)] + _notes(report)
    return html_table(HEAD, rows, title="training loop" if rows else "nothing recorded", notes=notes if rows else ())


def _hanging(name: str, said: str) -> list[str]:
    lines = wrap(printable(said), WIDTH - NAME) or [""]
    return [f"{name if not i else '':<{NAME}}{line}" for i, line in enumerate(lines)]


def _facts(report: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    summary, performance = report["summary"], report["performance_analysis"]
    memory, gradients = report["memory_analysis"], report["gradient_analysis"]
    if not summary["num_operations"]:
        return []
    steps = summary["num_training_steps"]
    failed = f", {counted(summary['num_errors'], 'exception')}" if summary["num_errors"] else ""
    rows = [("loop", f"{counted(steps, 'training step') if steps else counted(summary['num_operations'], 'operation')}{failed}")]
    if "verdict" in summary:
        found = listing([str(one["rule"]) for one in summary["findings"]]) or "nothing found"
        rows.append(("verdict", f"{summary['verdict']}: {found} ({summary['run']})"))
    if summary["last_loss"] is not None:
        lowest = f"; lowest {number(summary['lowest_loss'])}" if summary["lowest_loss"] is not None else ""
        rows.append(("loss", f"{number(summary['first_loss'])} at first, {number(summary['last_loss'])} at the end{lowest}"))
    if performance["status"] == "recorded":
        pace = f"; {number(performance['steps_per_second'])} steps per second" if performance["steps_per_second"] else ""
        rows.append(("time", f"{number(summary['total_time'])} s in all, most of it in {performance['slowest_operation']}{pace}"))
    rows.append(("memory", _memory(memory)))
    rows.append(("gradients", _gradients(gradients)))
    return rows


def _memory(memory: Mapping[str, Any]) -> str:
    if memory["status"] != "recorded":
        return str(memory["status"])
    cpu = memory["cpu"]
    first, last, most = (number(round(cpu[key], 1)) for key in ("first", "last", "peak"))
    said = f"{first} MiB at first, {last} at the end, {most} at most"
    if cpu["growth_per_operation"] is not None:
        said += f"; it grows by {number(cpu['growth_per_operation'])} MiB with every operation"
    if memory["gpu"] is not None:
        said += f"; GPU {number(round(memory['gpu']['peak'], 1))} MiB at most"
    tensors = {name: used for name, used in memory["tensors"].items() if used >= 0.05}
    return said + (f". Tensors: {', '.join(f'{name} {number(used)} MiB' for name, used in tensors.items())}" if tensors else "")


def _gradients(gradients: Mapping[str, Any]) -> str:
    if gradients["status"] != "recorded":
        return str(gradients["status"])
    bad = f"; {gradients['num_nonfinite']} of {gradients['num']} not finite" if gradients["num_nonfinite"] else ""
    said = "none is finite" if gradients["median_norm"] is None else (
        f"norm {number(gradients['median_norm'])} (median), {number(gradients['min_norm'])} to {number(gradients['max_norm'])}"
    )  # fmt: skip
    for what in ("vanishing", "exploding", "dead"):
        layers = gradients.get(f"{what}_layers")
        bad += f"; {what}: {listing(layers)}" if layers else ""
    return said + bad


def _notes(report: Mapping[str, Mapping[str, Any]]) -> list[str]:
    notes = list(report["summary"].get("notes", ()))
    hidden = len(notes) - MOST_NOTES
    return [*notes[:MOST_NOTES], f"and {hidden} more"] if hidden > 0 else notes


def _operations(report: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Each below the one that it is part of."""
    known = report["operation_breakdown"].get("operations", {})
    rows: list[list[str]] = []

    def add(inside: str, depth: int) -> None:
        for name, one in known.items():
            if one["inside"] == inside and depth < 8:
                cells = [milliseconds(1e3 * one.get(key, math.nan)) for key in ("median_time", "p95_time", "total_time")]
                share = percent(one["share"]) if one["share"] is not None else ""
                rows.append(["  " * depth + printable(name), f"{one['calls']:,}", *cells, share])
                add(name, depth + 1)

    add("", 0)
    return rows

"""The report on a debugged loop as text and HTML: facts, detected problems, and a table of operations."""

import math
from collections.abc import Mapping
from typing import Any

from sonde.formatting import counted, listing, milliseconds, number, percent, printable
from sonde.render.summaries.tables import hanging, html_table, text_table

NAME = 12
MOST_NOTES = 8  # detected problems
MOST_TENSORS = 3  # with statistics, in one line
HEAD = ("operation", "calls", "p50 ms", "p95 ms", "p99 ms", "total ms", "share")
LONGEST_NAME = 25  # characters: the table then fits into 80 columns


def debug_text(report: Mapping[str, Mapping[str, Any]]) -> str:
    rows = _operations(report)
    if not rows and report.get("summary", {}).get("debug_mode") == "none":
        return "nothing recorded: the mode is 'none'. Choose another mode, such as full_debug."
    if not rows:
        return "nothing recorded: wrap the operations of the loop, for instance with debug_training_step(...)"
    lines = [line for name, fact in _facts(report) for line in hanging(f"{name:<{NAME}}", fact)]
    table = text_table(_head(report), [[row[0][:LONGEST_NAME], *row[1:]] for row in rows])
    detected = [line for note in _notes(report) for line in hanging("- ", note)]
    return "\n".join([*lines, *(["", "detected", *detected] if detected else []), "", table])


def debug_html(report: Mapping[str, Mapping[str, Any]]) -> str:
    rows = _operations(report)
    notes = [f"{name}: {fact}" for name, fact in _facts(report)] + _notes(report)
    return html_table(_head(report), rows, title="training loop" if rows else "nothing recorded", notes=notes if rows else ())


def _head(report: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    return HEAD if report["details"]["performance"] else HEAD[:2]


def _facts(report: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    summary, details = report["summary"], report["details"]
    if not summary["total_debug_operations"]:
        return []
    steps = details["num_training_steps"]
    recorded = counted(steps, "training step") if steps else counted(summary["total_debug_operations"], "operation")
    failed = f", {counted(details['num_errors'], 'exception')}" if details["num_errors"] else ""
    rows = [("loop", recorded + failed), ("problems", _problems(summary))]
    if "verdict" in details:
        found = listing([str(one["rule"]) for one in details["findings"]]) or "nothing found"
        rows.append(("verdict", f"{details['verdict']}: {found} ({details['run']})"))
    if details["last_loss"] is not None:
        lowest = f"; lowest {number(details['lowest_loss'])}" if details["lowest_loss"] is not None else ""
        rows.append(("loss", f"first {number(details['first_loss'])}, last {number(details['last_loss'])}{lowest}"))
    rows.append(("time", _time(details["performance"])))
    rows.append(("memory", _memory(details["memory"])))
    rows.append(("gradients", _gradients(report["gradient_analysis"], details["gradients"])))
    rows.extend((kind, _statistics(tensors)) for kind, tensors in details["statistics"].items())
    return rows


def _problems(summary: Mapping[str, Any]) -> str:
    kinds = (("anomalies_detected", "anomaly", "anomalies"), ("memory_leaks_detected", "memory leak", "memory leaks"),
             ("performance_issues_detected", "slow operation", "slow operations"))  # fmt: skip
    found = [f"{summary[key]:,} {one if summary[key] == 1 else several}" for key, one, several in kinds if summary[key]]
    return ", ".join(found) or "none"


def _time(performance: Mapping[str, Any]) -> str:
    if not performance:
        return "not recorded"
    pace = f"; {number(performance['steps_per_second'])} steps per second" if performance["steps_per_second"] else ""
    return f"{number(performance['total_time'])} s in total, most of it in {performance['slowest_operation']}{pace}"


def _statistics(tensors: Mapping[str, Mapping[str, float]]) -> str:
    shown = list(tensors.items())[:MOST_TENSORS]
    texts = [f"{printable(name)} mean {number(each['mean'])}, std {number(each['std'])}" for name, each in shown]
    more = [f"and {len(tensors) - MOST_TENSORS} more in details['statistics']"] if len(tensors) > MOST_TENSORS else []
    return "last measured: " + "; ".join([*texts, *more])


def _memory(memory: Mapping[str, Any]) -> str:
    if not memory:
        return "not recorded"
    cpu = memory["cpu"]
    first, last, peak = (number(round(cpu[key], 1)) for key in ("first", "last", "peak"))
    text = f"first {first} MiB, last {last}, peak {peak}"
    if cpu["growth_per_operation"] is not None:
        text += f"; grows by {number(cpu['growth_per_operation'])} MiB per operation"
    if memory["gpu"] is not None:
        text += f"; GPU peak {number(round(memory['gpu']['peak'], 1))} MiB"
    tensors = {name.replace("_", " "): used for name, used in memory["tensors"].items() if used >= 0.05}
    return text + (f". Tensors: {', '.join(f'{name} {number(used)} MiB' for name, used in tensors.items())}" if tensors else "")


def _gradients(analysis: Mapping[str, Any], gradients: Mapping[str, Any]) -> str:
    if not gradients:
        return "not recorded"
    text = "no norm is finite" if gradients["median_norm"] is None else (
        f"norm {number(gradients['median_norm'])} (median), {number(gradients['min_norm'])} to {number(analysis['max_gradient_norm'])}"
    )  # fmt: skip
    if gradients["num_nonfinite"]:
        text += f"; {gradients['num_nonfinite']} of {gradients['num']} not finite"
        if layers := gradients.get("nonfinite_layers"):
            text += f", in {listing(layers)}"
    for verdict in ("vanishing", "exploding", "dead"):
        layers = gradients.get(f"{verdict}_layers")
        text += f"; {verdict}: {listing(layers)}" if layers else ""
    return text


def _notes(report: Mapping[str, Mapping[str, Any]]) -> list[str]:
    notes = list(report["details"]["notes"])
    return [*notes[:MOST_NOTES], f"and {len(notes) - MOST_NOTES} more"] if len(notes) > MOST_NOTES else notes


def _operations(report: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The rows of the table; each operation is below the one that encloses it."""
    known = report["details"]["operations"]
    rows: list[list[str]] = []

    def add(inside: str, depth: int) -> None:
        for name, one in known.items():
            if one["inside"] == inside and depth < 8:
                if "total_time" not in one:
                    rows.append(["  " * depth + printable(name), f"{one['calls']:,}"])
                    add(name, depth + 1)
                    continue
                cells = [milliseconds(1e3 * one.get(key, math.nan)) for key in ("median_time", "p95_time", "p99_time", "total_time")]
                share = percent(one["share"]) if one["share"] is not None else ""
                rows.append(["  " * depth + printable(name), f"{one['calls']:,}", *cells, share])
                add(name, depth + 1)

    add("", 0)
    return rows

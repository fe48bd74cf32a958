"""What was recorded of a loop, in five sections. A number that nobody measured is None, and a section without any says so."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.errors import SondeError
from sonde.report import strict
from sonde.rules.words import listing
from sonde.tools.layer_patterns import require_name
from sonde.tools.loop_debugger.measurements import Meter
from sonde.tools.loop_debugger.operation_history import Book, Memory, Operation
from sonde.views.plots.panels import MOST_LINES, Panel, panels
from sonde.views.plots.plot import Plot

if TYPE_CHECKING:
    from sonde.session import DebugSession

SECTIONS = ("summary", "performance_analysis", "memory_analysis", "gradient_analysis", "operation_breakdown")
NOTHING = "nothing recorded"
MOST_NOTES = 20  # of what was detected, the last ones
STEP = "training_step"


class DebugReport(dict[str, dict[str, Any]]):
    """A dict of the five sections, that prints as text and shows as a table in a notebook."""

    @property
    def is_empty(self) -> bool:
        return self["summary"].get("status") == NOTHING

    def operation(self, name: str) -> dict[str, Any]:
        """What is known of one operation."""
        known = self["operation_breakdown"].get("operations", {})
        if not known:
            raise SondeError(f"no operation {name!r} was recorded: {NOTHING} yet.")
        found: dict[str, Any] = known[require_name(name, known, "operation")]
        return found

    def to_json(self) -> str:
        """One strict JSON document; what is not finite is the string "NaN", "Infinity" or "-Infinity"."""
        return json.dumps(strict(self), indent=1, allow_nan=False)

    def text(self) -> str:
        from sonde.views.debug_report import debug_text

        return debug_text(self)

    __str__ = text

    def _repr_html_(self) -> str:
        from sonde.views.debug_report import debug_html

        return debug_html(self)


def report_of(book: Book, meter: Meter, session: DebugSession | None = None) -> DebugReport:
    """The report on what a book holds; with a session, its verdict is in the summary."""
    summary = _summary(book)
    if session is not None and session.run is not None:
        judged = session.report()
        findings = [strict(asdict(finding)) for finding in judged.findings]
        summary |= {"verdict": judged.verdict, "findings": findings, "run": str(session.run)}
    return DebugReport(
        summary=summary,
        performance_analysis=_performance(book),
        memory_analysis=_memory(book, meter),
        gradient_analysis=_gradients(book, meter),
        operation_breakdown=_breakdown(book),
    )


def _summary(book: Book) -> dict[str, Any]:
    if not book.num:
        return {"status": NOTHING, "num_operations": 0}
    losses = [info.loss for info in book.infos if info.loss is not None and not info.inside]
    losses = losses or [info.loss for info in book.infos if info.loss is not None]
    outermost = [one for one in book.operations.values() if not one.inside]
    notes = [f"{info.operation} {info.number}: {note}" for info in book.infos if not info.inside for note in info.notes]
    return {
        "status": "recorded",
        "num_operations": book.num,
        "num_training_steps": sum(one.calls for one in book.operations.values() if one.name == STEP),
        "num_errors": sum(one.num_errors for one in outermost),
        "total_time": math.fsum(one.total_s for one in outermost),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "lowest_loss": min((loss for loss in losses if math.isfinite(loss)), default=None),
        "anomalies_detected": book.counts["anomaly"],
        "memory_leaks_detected": book.counts["leak"],
        "performance_issues_detected": book.counts["slow"],
        "notes": notes[-MOST_NOTES:],
    }


def _performance(book: Book) -> dict[str, Any]:
    times = [info.execution_time for info in book.infos if info.execution_time is not None and not info.inside]
    if not times:
        return {"status": NOTHING}
    slowest = max(book.operations.values(), key=lambda one: one.total_s if not _holds(book, one) else 0.0)
    steps = [info.execution_time for info in book.infos if info.operation == STEP and info.execution_time is not None]
    return {
        "status": "recorded",
        **_times(times),
        "slowest_operation": slowest.name,
        "steps_per_second": 1 / median(steps) if steps and median(steps) > 0 else None,
        "num_slow": book.counts["slow"],
        "slow": [f"{info.operation} {info.number}" for info in book.infos if info.performance_issue_detected][-MOST_NOTES:],
    }


def _times(times: Sequence[float]) -> dict[str, float]:
    """Seconds."""
    return {
        "total_time": math.fsum(times), "average_time": fmean(times), "median_time": median(times),
        "p95_time": float(np.quantile(times, 0.95)), "max_time": max(times),
    }  # fmt: skip


def _holds(book: Book, operation: Operation) -> bool:
    return any(one.inside == operation.name for one in book.operations.values())


def _memory(book: Book, meter: Meter) -> dict[str, Any]:
    if not book.memory.num:
        return {"status": NOTHING}
    found = {"status": "recorded", "cpu": _one_memory(book.memory), "gpu": _one_memory(book.gpu) if book.gpu.peak > 0 else None}
    by_category = meter.tensors[-1][1] if meter.tensors else {}
    return {**found, "tensors": by_category, "leak_detected": book.memory.trend is not None or book.gpu.trend is not None}


def _one_memory(memory: Memory) -> dict[str, Any]:
    """MiB; the growth is per operation."""
    growth = memory.trend.per_step if memory.trend is not None else None
    return {"first": memory.first, "last": memory.last, "average": memory.mean, "peak": memory.peak, "growth_per_operation": growth}


def _gradients(book: Book, meter: Meter) -> dict[str, Any]:
    norms = [info.gradient_norm for info in book.infos if info.gradient_norm is not None and info.operation != STEP]
    norms = norms or [info.gradient_norm for info in book.infos if info.gradient_norm is not None]
    if not norms:
        return {"status": NOTHING}
    finite = [norm for norm in norms if math.isfinite(norm)]
    found: dict[str, Any] = {
        "status": "recorded", "num": len(norms), "last_norm": norms[-1], "num_nonfinite": len(norms) - len(finite),
        "average_norm": fmean(finite) if finite else None, "median_norm": median(finite) if finite else None,
        "min_norm": min(finite, default=None), "max_norm": max(finite, default=None),
    }  # fmt: skip
    layers = meter.layers.analyze()
    if layers.overall_health is not None:
        found |= {
            "health": str(layers.overall_health.value), "vanishing_layers": layers.vanishing_layers(),
            "exploding_layers": layers.exploding_layers(), "dead_layers": layers.dead_layers(),
            "layer_norms": {name: one.last_norm for name, one in layers.layers.items()},
        }  # fmt: skip
    return found


def _breakdown(book: Book) -> dict[str, Any]:
    if not book.operations:
        return {"status": NOTHING, "operations": {}}
    whole = math.fsum(one.total_s for one in book.operations.values() if not one.inside)
    operations: dict[str, Any] = {}
    for one in book.operations.values():
        name = one.name if one.name not in operations else f"{one.name} in {one.inside or 'nothing'}"
        within = math.fsum(other.total_s for other in book.operations.values() if other.inside == one.name)
        times = _times(one.times_s) if one.times_s else {}
        operations[name] = {
            "calls": one.calls, **times, "total_time": one.total_s, "own_time": max(0.0, one.total_s - within),
            "share": one.total_s / whole if whole > 0 else None, "inside": one.inside, "num_errors": one.num_errors,
        }  # fmt: skip
    return {"status": "recorded", "operations": operations}


def panels_of(book: Book) -> Plot:
    """Losses, gradient norms, times and memory, by the number of the operation that measured them."""
    infos = list(book.infos)
    outer, inner = ([info for info in infos if bool(info.inside) == inside] for inside in (False, True))
    loss = _points((info.number, info.loss) for info in outer) or _points((info.number, info.loss) for info in inner)
    norms = _points((info.number, info.gradient_norm) for info in infos if info.operation != STEP)
    norms = norms or _points((info.number, info.gradient_norm) for info in infos)
    times = {}
    for (name, inside), operation in sorted(book.operations.items(), key=lambda item: -item[1].total_s):
        mine = [info for info in infos if (info.operation, info.inside) == (name, inside) and info.execution_time is not None]
        if operation.times_s and (points := _points((info.number, 1e3 * (info.execution_time or 0.0)) for info in mine)) is not None:
            times[name] = points
    repeated = {name: points for name, points in times.items() if len(points[0]) > 1}
    cpu = _points((at, info.memory_usage) for at, info in enumerate(outer))
    gpu = _points((at, info.gpu_memory) for at, info in enumerate(outer)) if book.gpu.peak > 0 else None
    odd = sorted({info.number for info in infos if info.anomaly_detected})
    slow = sorted({info.number for info in infos if info.performance_issue_detected})
    names = [one.name for one in book.operations.values() if not one.inside]
    each = (
        Panel("loss", "loss", {"loss": loss} if loss else {}, odd if loss else (), "anomaly"),
        Panel("gradient norm", "L2 norm", {"gradient norm": norms} if norms else {}, odd if norms else (), "anomaly"),
        Panel("time", "ms", dict(list((repeated or times).items())[:MOST_LINES]), slow if times else (), "slow"),
        Panel("memory", "MiB", {name: points for name, points in (("process", cpu), ("GPU", gpu)) if points}),
    )
    return panels("training loop", each, notes=f"{book.num:,} operations: {listing(names)}" if book.num else NOTHING)


def _points(pairs: Iterable[tuple[int, float | None]]) -> tuple[list[float], list[float]] | None:
    known = [(float(at), value) for at, value in pairs if value is not None]
    return ([at for at, _ in known], [value for _, value in known]) if known else None

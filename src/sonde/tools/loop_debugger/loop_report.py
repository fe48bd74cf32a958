"""The report on a debugged loop: five sections with fixed keys, and `details` with the rest. A number that was not measured is None."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.config import DebugConfig
from sonde.formatting import counted, listing, strict, strict_json
from sonde.layer_name_patterns import require_name
from sonde.render.plots.figure_with_panels import MOST_LINES, EventPanel, Panel, panels
from sonde.render.plots.plot import Plot
from sonde.render.summaries.loop_debugger_summary import debug_html, debug_text
from sonde.tools.loop_debugger.measure_loop_operation import LoopMeasurements, memory_details
from sonde.tools.loop_debugger.operation_history import MemorySeries, OperationCalls, OperationHistory

if TYPE_CHECKING:
    from sonde.session import DebugSession

STEP = "training_step"
MAX_SLOW = 20  # names of slow operations, the last ones

Series = tuple[list[float], list[float]]


class DebugReport(dict[str, dict[str, Any]]):
    """The report as a dict: five sections and `details`. It prints as text and displays as a table in a notebook."""

    @property
    def is_empty(self) -> bool:
        """Whether no operation was recorded."""
        return not self["summary"]["total_debug_operations"]

    def operation(self, name: str) -> dict[str, Any]:
        """The times of one operation."""
        known: dict[str, dict[str, Any]] = self["details"]["operations"]
        return known[require_name(name, known, "operation")]

    def to_json(self) -> str:
        """One strict JSON document; a number that is not finite is the string "NaN", "Infinity" or "-Infinity"."""
        return strict_json(self)

    def text(self) -> str:
        """The report for a terminal."""
        return debug_text(self)

    __str__ = text

    def _repr_html_(self) -> str:
        return debug_html(self)


def build_debug_report(
    history: OperationHistory, measurements: LoopMeasurements, config: DebugConfig, session: DebugSession | None = None
) -> DebugReport:
    """The report on the recorded operations; with a session, its verdict and findings are in `details`."""
    times, memory, gpu = list(history.times_s), history.memory, history.gpu
    norms = [norm for _, norm in history.gradient_norms if math.isfinite(norm)]
    calls: Counter[str] = Counter()
    for each in history.operations.values():
        calls[each.name] += each.num_calls
    return DebugReport(
        summary={
            "total_debug_operations": history.num, "anomalies_detected": history.num_anomalies,
            "memory_leaks_detected": history.num_leaks, "performance_issues_detected": history.num_slow,
            "debug_mode": config.mode.value, "debug_level": config.level.value,
        },
        performance_analysis={
            "average_execution_time": fmean(times) if times else None, "max_execution_time": max(times, default=None),
            "min_execution_time": min(times, default=None),
        },
        memory_analysis={
            "average_memory_usage": memory.mean, "max_memory_usage": memory.peak if memory.num else None,
            "average_gpu_memory": gpu.mean, "max_gpu_memory": gpu.peak if gpu.num else None,
        },
        gradient_analysis={
            "average_gradient_norm": fmean(norms) if norms else None, "max_gradient_norm": max(norms, default=None),
            "gradient_anomalies": history.num_gradient_anomalies,
        },
        operation_breakdown=dict(calls), details=_details(history, measurements, session),
    )  # fmt: skip


def _details(history: OperationHistory, measurements: LoopMeasurements, session: DebugSession | None) -> dict[str, Any]:
    losses = [loss for _, loss in history.losses]
    outermost = [each for each in history.operations.values() if not each.inside]
    details: dict[str, Any] = {
        "num_training_steps": sum(each.num_calls for each in history.operations.values() if each.name == STEP),
        "num_errors": sum(each.num_errors for each in outermost),
        "first_loss": losses[0] if losses else None, "last_loss": losses[-1] if losses else None,
        "lowest_loss": min((loss for loss in losses if math.isfinite(loss)), default=None),
        "notes": [*history.anomalies, *history.other_notes],  # the first anomaly is first
        "performance": _performance(history, outermost), "memory": _memory(history, measurements),
        "gradients": _gradients(history, measurements), "statistics": dict(history.statistics), "operations": _operations(history),
    }  # fmt: skip
    if session is not None and session.run is not None:
        report = session.report()
        details |= {"verdict": report.verdict, "findings": [strict(asdict(each)) for each in report.findings], "run": str(session.run)}
    return details


def _performance(history: OperationHistory, outermost: Sequence[OperationCalls]) -> dict[str, Any]:
    if not history.logs_times:
        return {}
    enclosing = {each.inside for each in history.operations.values()}
    innermost = [each for each in history.operations.values() if each.name not in enclosing]
    steps = [time_s for each in history.operations.values() if each.name == STEP for time_s in each.times_s]
    return {
        "total_time": math.fsum(each.total_s for each in outermost),
        **(_quantiles(list(history.times_s)) if history.times_s else {}),
        "slowest_operation": max(innermost, key=lambda each: each.total_s).name if innermost else None,
        "steps_per_second": 1 / median(steps) if steps and median(steps) > 0 else None,
        "slow": [f"{info.operation} {info.number}" for info in history.infos if info.performance_issue_detected][-MAX_SLOW:],
    }


def _quantiles(times: Sequence[float]) -> dict[str, float]:
    p95, p99 = np.quantile(times, [0.95, 0.99]).tolist()
    return {"average_time": fmean(times), "median_time": median(times), "p95_time": p95, "p99_time": p99, "max_time": max(times)}


def _memory(history: OperationHistory, measurements: LoopMeasurements) -> dict[str, Any]:
    if not history.memory.num:
        return {}
    return {
        "cpu": _memory_series(history.memory), "gpu": _memory_series(history.gpu) if history.gpu.peak > 0 else None,
        "process": memory_details(), "tensors": dict(measurements.memory_by_category),
        "leak_detected": history.memory.trend is not None or history.gpu.trend is not None,
    }  # fmt: skip


def _memory_series(memory: MemorySeries) -> dict[str, Any]:
    growth = memory.trend.per_step if memory.trend is not None else None
    return {"first": memory.first, "last": memory.last, "average": memory.mean, "peak": memory.peak, "growth_per_operation": growth}


def _gradients(history: OperationHistory, measurements: LoopMeasurements) -> dict[str, Any]:
    norms = [norm for _, norm in history.gradient_norms]
    if not norms:
        return {}
    finite = [norm for norm in norms if math.isfinite(norm)]
    found: dict[str, Any] = {
        "num": len(norms), "num_nonfinite": len(norms) - len(finite), "last_norm": norms[-1],
        "median_norm": median(finite) if finite else None, "min_norm": min(finite, default=None),
    }  # fmt: skip
    update = next((info for info in reversed(history.infos) if info.operation == "optimization_step"), None)
    if update is not None:
        size = {"update_norm": update.update_norm or None, "update_ratio": update.update_ratio or None}  # 0.0: not measured
        found |= {"learning_rate": update.learning_rate, **size}
    layers = measurements.layers.analyze()
    if layers.overall_health is not None:
        nonfinite = layers.nonfinite_layers()
        found |= {
            "health": str(layers.overall_health.value), "vanishing_layers": layers.vanishing_layers(),
            "exploding_layers": [name for name in layers.exploding_layers() if name not in nonfinite],
            "nonfinite_layers": nonfinite, "dead_layers": layers.dead_layers(),
            "layer_norms": {name: each.last_norm for name, each in layers.layers.items()},
        }  # fmt: skip
    return found


def _operations(history: OperationHistory) -> dict[str, Any]:
    """Calls and times in seconds by operation; `own_time` is without the operations inside, `share` is of all recorded time."""
    whole = math.fsum(each.total_s for each in history.operations.values() if not each.inside)
    operations: dict[str, Any] = {}
    for each in history.operations.values():
        name = each.name if each.name not in operations else f"{each.name} in {each.inside or 'no operation'}"
        inside = math.fsum(other.total_s for other in history.operations.values() if other.inside == each.name)
        operations[name] = {"calls": each.num_calls, "inside": each.inside, "num_errors": each.num_errors}
        if history.logs_times:
            operations[name] |= {
                **_quantiles(each.times_s), "total_time": each.total_s, "own_time": max(0.0, each.total_s - inside),
                "share": each.total_s / whole if whole > 0 else None,
            }  # fmt: skip
    return operations


def plot_history(history: OperationHistory) -> Plot:
    """Execution time, memory, gradient norm and anomalies, over the number of the operation."""
    infos = list(history.infos)
    outermost = [info for info in infos if not info.inside]
    names = [each.name for each in history.operations.values() if not each.inside]
    last = max((info.number for info in infos), default=0)
    memory = {"process": _series(enumerate(info.memory_usage for info in outermost))} if history.memory.num else {}
    if history.gpu.peak > 0:
        memory["GPU"] = _series(enumerate(info.gpu_memory for info in outermost))
    norms = {"gradient norm": _series(history.gradient_norms)} if history.gradient_norms else {}
    unusual = sorted({number for number, kind in history.events if kind not in ("slow", "memory growth")})
    slow = sorted({number for number, kind in history.events if kind == "slow"})
    times = _times_by_operation(history) if history.times_s else {}
    events: dict[str, list[float]] = {}
    for number, kind in dict.fromkeys(history.events):  # an operation may have several problems of one kind
        events.setdefault(kind, []).append(float(number))
    empty = "no anomalies" if history.num else "nothing recorded"
    panel_list = (
        Panel("execution time", "ms", times, slow if times else (), "slow", x_label="call"),
        Panel("memory", "MiB" if "GPU" in memory else "MiB (CPU, no GPU in use)", memory, x_label="operation", includes=0.0),
        Panel("gradient norm", "L2 norm", norms, unusual if norms else (), "anomaly", x_label="backward pass"),
        EventPanel("anomalies", dict(list(events.items())[:MOST_LINES]), (0, last), empty=empty, x_label="call"),
    )
    title = f"{counted(history.num, 'operation')}: {listing(names)}" if history.num else "nothing recorded"
    return panels("debug analysis", panel_list, notes=title)


def _times_by_operation(history: OperationHistory) -> dict[str, Series]:
    """Milliseconds, of the operations that take the most time."""
    points: dict[tuple[str, str], Series] = {}
    for info in history.infos:
        numbers, times = points.setdefault((info.operation, info.inside), ([], []))
        numbers.append(info.number)
        times.append(1e3 * info.execution_time)
    ordered = sorted(points, key=lambda key: -history.operations[key].total_s)
    repeated = [key for key in ordered if len(points[key][0]) > 1]
    return {name: points[name, inside] for name, inside in (repeated or ordered)[:MOST_LINES]}


def _series(pairs: Iterable[tuple[int, float]]) -> Series:
    points = list(pairs)
    return [float(number) for number, _ in points], [value for _, value in points]

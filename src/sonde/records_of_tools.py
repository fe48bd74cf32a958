"""One sentence about what a tool holds, for the report of the session that it belongs to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sonde.errors import SondeError
from sonde.formatting import counted, listing, number, size

if TYPE_CHECKING:
    from sonde.memory_profiler.memory_profiler import MemoryProfiler
    from sonde.profiler.profiler import Profiler
    from sonde.tools.debug_visualizer import DebugVisualizer
    from sonde.tools.gradient_debugger import GradientDebugger
    from sonde.tools.hooks import Hooks
    from sonde.tools.model_diagnostics import ModelDiagnostics
    from sonde.tools.stability_checker import StabilityChecker
    from sonde.tools.tensor_inspector import TensorInfo, TensorInspector

MAX_NAMES = 3  # tensors, layers, sections in one sentence


def describe_records(name: str, tool: Any) -> str:
    """The sentence about a tool, by its name in the session; "" if it holds nothing, or keeps no records at all."""
    describe = _DESCRIBE.get(name)
    return "" if describe is None else describe(tool)


def _inspected_tensors(tool: TensorInspector) -> str:
    names = tool.names()
    if not names:
        return ""
    last = [tool.history(name)[-1] for name in names]
    last.sort(key=lambda info: not (info.stats.num_nan or info.stats.num_inf))  # those with NaN or Inf first
    num = sum(len(tool.history(name)) for name in names)
    return f"{counted(num, 'inspection')} of {counted(len(names), 'tensor')}: {listing([_tensor(info) for info in last], MAX_NAMES)}"


def _tensor(info: TensorInfo) -> str:
    stats = info.stats
    bad = "".join(f", {num:,} {kind}" for kind, num in (("NaN", stats.num_nan), ("Inf", stats.num_inf)) if num)
    measured = stats.unsupported or f"mean {number(stats.mean)}, std {number(stats.std)}{bad}"
    return f"{info.name} {list(stats.shape)} ({measured})"


def _gradient_flows(tool: GradientDebugger) -> str:
    if not tool.has_records:
        return ""
    report = tool.analyze()
    health = report.overall_health.value.replace("_", " ") if report.overall_health is not None else "could not tell"
    kinds = {"exploding": report.exploding_layers(), "vanishing": report.vanishing_layers(), "dead": report.dead_layers()}
    flagged = "".join(f"; {kind}: {listing(layers, MAX_NAMES)}" for kind, layers in kinds.items() if layers)
    norms = [norm for norm in report.total_norms if math.isfinite(norm)]
    course = f"; total norm {number(norms[0])} at first, {number(norms[-1])} at last" if norms else ""
    return f"gradients of {counted(len(report.layers), 'layer')} in {counted(report.num_steps, 'step')}: {health}{flagged}{course}"


def _metrics(tool: ModelDiagnostics) -> str:
    if not tool.num_recorded:
        return ""
    report = tool.analyze()
    dynamics = report.dynamics
    return f"metrics of {counted(tool.num_recorded, 'step')}: health {report.health}, {dynamics.learning}: {dynamics.why}"


def _times(tool: Profiler) -> str:
    try:
        report = tool.report()
    except SondeError:
        return ""  # nothing was timed
    sections = [f"{one.name} {counted(one.calls, 'time')}, {number(one.spread.median_ms)} ms each" for one in report.sections]
    layers = sorted(report.layers, key=lambda layer: -layer.total_ms if math.isfinite(layer.total_ms) else math.inf)
    slowest = [f"{layer.path or 'the model'} {number(layer.total_ms)} ms" for layer in layers]
    parts = []
    if sections:
        parts.append(f"{counted(len(sections), 'timed section')}: {listing(sections, MAX_NAMES)}")
    if layers:
        parts.append(f"{counted(len(layers), 'timed layer')}: {listing(slowest, MAX_NAMES)}")
    return "; ".join(parts)


def _memory(tool: MemoryProfiler) -> str:
    try:
        report = tool.report()
    except SondeError:
        return ""  # nothing was measured
    peak = f"peak {size(report.on().peak.usage.total)} on {report.device}"
    totals = [f"{one.label} {size(sum(usage.total for usage in one.usage.values()))}" for one in report.snapshots]
    return f"{counted(len(totals), 'snapshot')}: {listing(totals, MAX_NAMES)}; {peak}" if totals else peak


def _checked_tensors(tool: StabilityChecker) -> str:
    if not tool.checked:
        return ""
    names = list(dict.fromkeys(one.name for one in tool.checked if one.issues()))
    return f"{counted(len(tool.checked), 'tensor')} checked, {f'issues in {listing(names, MAX_NAMES)}' if names else 'no issue'}"


def _hooks(tool: Hooks) -> str:
    if not tool.results and not tool.alerts:
        return ""
    ran = [f"{one.name} {counted(one.executions, 'time')}" for one in tool.status().values() if one.executions]
    alerts = f"; {counted(len(tool.alerts), 'alert')}, the last: {tool.alerts[-1].message}" if tool.alerts else ""
    return f"{counted(len(ran), 'hook')} ran: {listing(ran, MAX_NAMES)}{alerts}"


def _plots(tool: DebugVisualizer) -> str:
    names = tool.get_plot_names()
    return f"{counted(len(names), 'plot')}: {listing(names, MAX_NAMES)}" if names else ""


_DESCRIBE: dict[str, Any] = {
    "tensor_inspector": _inspected_tensors, "gradient_debugger": _gradient_flows, "model_diagnostics": _metrics, "profiler": _times,
    "memory_profiler": _memory, "stability_checker": _checked_tensors, "hooks": _hooks, "visualizer": _plots,
}  # fmt: skip

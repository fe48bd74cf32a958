"""What every rendering of a profile shows: sentences on the step, its phases, sections and the machine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sonde.formatting import DASH, counted, milliseconds, number, si_number, whole_percent
from sonde.render.profile_tree import finite

if TYPE_CHECKING:
    from sonde.profiler import ProfileReport, Section, TimeSpread

ENVIRONMENT = ("torch", "device", "dtype")  # what times depend on most; the file has the rest
IDLE = 0.2  # cores: some program is always running
MAX_LATENCIES = 8  # layers with percentiles
CHEAP = 1.005  # a profiled step over a bare one: less is not worth a line


def profile_facts(report: ProfileReport) -> list[tuple[str, str]]:
    """What was profiled, how long a step takes, how much of the machine it uses, and what profiling cost."""
    rows = [("profile", headline(report))]
    if report.step.is_known:
        rows.append(("step", _step(report)))
    if report.flops_per_step:
        rows.append(("arithmetic", _arithmetic(report)))
    rows += [("processor", text) for text in _utilization(report)]
    if report.own_cost > CHEAP:
        rows.append(("cost", f"a profiled step takes {number(report.own_cost)} times as long as a bare one; times here leave that out"))
    return rows


def headline(report: ProfileReport) -> str:
    """`Net, batch float32 [32, 64], torch 2.13.0, device cpu`."""
    environment = [f"{name} {report.environment[name]}" for name in ENVIRONMENT if name in report.environment]
    parts = [report.title or "a profile", f"batch {report.batch}" if report.batch else "", *environment]
    return ", ".join(part for part in parts if part)


def phases(report: ProfileReport) -> list[tuple[str, TimeSpread, float]]:
    """Each phase that took time, with its share of the step."""
    return [(name, spread, report.phase_share(name)) for name, spread in report.phases.items() if spread.is_known]


def outside_layers(report: ProfileReport) -> str:
    """What the step does in no layer, and how much of it is accounted for; empty where that is not known."""
    parts = sorted(((ms, name) for name, ms in report.remainder.items() if ms > 0), reverse=True)
    if not parts or not report.step.is_known:
        return ""
    named = "; ".join(f"{name} {milliseconds(ms)} ms" for ms, name in parts)
    return f"{named}. Layers and these add up to {whole_percent(report.accounted_ms / report.step.median_ms)} of the step"


def advice(report: ProfileReport) -> tuple[list[str], list[str], list[str]]:
    """What takes the time, what to try, and notes."""
    slow = [f"{one.where}: {milliseconds(one.ms)} ms; {one.why}" for one in report.bottlenecks()]
    return slow, list(report.recommendations()), list(report.notes)


SECTION_HEAD = ("section", "calls", "total ms", "share", "p50 ms", "p95 ms", "p99 ms")
LATENCY_HEAD = ("latency", "p50 ms", "p95 ms", "p99 ms", "of")


def latencies(report: ProfileReport, limit: int = MAX_LATENCIES) -> tuple[list[tuple[str, ...]], str]:
    """Rows of percentiles, of the step and of the layers that take the most time themselves; and what is left out, in words."""
    layers = [layer for layer in report.layers if _has_percentiles(layer.latency) and layer.total_ms > 0]
    layers.sort(key=lambda layer: -finite(layer.self_ms))
    rows: list[tuple[str, ...]] = []
    if _has_percentiles(report.step):
        rows.append(("step", *_percentiles(report.step), counted(report.step.num, "step")))
    for layer in layers[:limit]:
        what = "call" if layer.is_recorded else "step"
        rows.append((layer.path or layer.kind, *_percentiles(layer.latency), counted(layer.latency.num, what)))
    hidden = len(layers) - limit
    return rows, f"and {counted(hidden, 'more layer')}: report.layer(name).latency" if hidden > 0 else ""


def _has_percentiles(spread: TimeSpread) -> bool:
    return spread.num > 1 and math.isfinite(spread.p99_ms)


def _percentiles(spread: TimeSpread) -> tuple[str, str, str]:
    return milliseconds(spread.p50_ms), milliseconds(spread.p95_ms), milliseconds(spread.p99_ms)


def sections(report: ProfileReport) -> list[tuple[str, ...]]:
    """Rows of sections, those inside others indented: name, calls, total, share of the outermost ones together, percentiles of a call."""
    inside: dict[str, list[Section]] = {}
    names = {section.name for section in report.sections}
    for section in report.sections:
        inside.setdefault(section.parent if section.parent in names and section.parent != section.name else "", []).append(section)
    result: list[tuple[str, ...]] = []
    outermost = inside.pop("", [])
    whole_ms = math.fsum(section.total_ms for section in outermost)
    left = [(section, 0) for section in reversed(outermost)]
    while left:
        section, depth = left.pop()
        share = whole_percent(section.total_ms / whole_ms) if whole_ms > 0 else DASH
        times = milliseconds(section.total_ms), share, *_percentiles(section.spread)
        result.append(("  " * depth + section.name, f"{section.calls:,}", *times))
        left += [(child, depth + 1) for child in reversed(inside.pop(section.name, []))]
    return result


def _step(report: ProfileReport) -> str:
    spread = report.step
    parts = [f"{milliseconds(spread.median_ms)} ms"]
    if spread.num > 1:
        half = f"{milliseconds(spread.low_ms)} to {milliseconds(spread.high_ms)} in the middle half"
        parts[0] += f" ({half} of {counted(spread.num, 'step')})"
    if math.isfinite(report.samples_per_s):
        parts.append(f"{report.samples_per_s:,.0f} samples/s")
    if report.tokens_per_s is not None and math.isfinite(report.tokens_per_s):
        parts.append(f"{report.tokens_per_s:,.0f} tokens/s")
    return ", ".join(parts)


def _arithmetic(report: ProfileReport) -> str:
    text = f"{si_number(report.flops_per_step, 'FLOP')} per step"
    if math.isfinite(report.flops_per_s):
        text += f", {si_number(report.flops_per_s, 'FLOP/s')}"
    if math.isfinite(report.mfu):
        text += f": {whole_percent(report.mfu)} of the {si_number(report.peak_flops_per_s, 'FLOP/s')} that this machine reached (MFU)"
    return text


def _utilization(report: ProfileReport) -> list[str]:
    """How busy the machine was. A file may have other names than these; they are shown as they are."""
    left = dict(report.utilisation)
    words = []
    busy, cores = left.pop("busy_cores", None), left.pop("num_cores", None)
    if busy is not None:
        left.pop("cpu_share", None)
        words += [f"{_rounded(busy)} of {_rounded(cores)} cores busy"] if cores is not None else []
    if (threads := left.pop("num_threads", None)) is not None:
        words.append(f"{_rounded(threads)} thread{'' if threads == 1 else 's'}")
    if (others := left.pop("others_busy_cores", None)) is not None and not (isinstance(others, float) and others < IDLE):
        words.append(f"other programs used {_rounded(others)}, so times vary")
    for name, value in left.items():
        share = isinstance(value, float) and name.endswith("_share")
        words.append(f"{name.removesuffix('_share').replace('_', ' ')} {whole_percent(float(value)) if share else _rounded(value)}")
    return [", ".join(words)] if words else []


def _rounded(value: float | str) -> str:
    return value if isinstance(value, str) else number(round(value, 1))

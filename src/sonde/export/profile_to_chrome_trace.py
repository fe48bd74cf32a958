"""The measured steps of a profile as a trace: phases, calls of layers forward and backward, sections, and saved activations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sonde.errors import SondeError
from sonde.export.chrome_trace_format import Times, Trace, Track, in_lanes

if TYPE_CHECKING:
    from sonde.profiler import LayerCost, ProfileReport, Span

SAVED = "activations saved for backward (bytes)"


def trace_of_profile(report: ProfileReport) -> Trace:
    """A trace of the steps whose spans were recorded."""
    spans = [span for span in report.spans if math.isfinite(span.start_ms) and span.duration_ms >= 0]
    if not spans:
        raise SondeError(
            "this profile holds no spans, only sums, so no trace can be made of it.\n"
            "Profile again: sonde profile -o trace.json.gz script.py, or Profiler().profile(model, inputs)"
        )
    trace = Trace({"profile": report.title, "batch": report.batch, "made by": "sonde profile", **report.environment})
    pid = trace.process(f"profile of {report.title or 'a model'}", labels=report.batch)
    layers = {layer.path: layer for layer in report.layers}
    _add_steps(trace, pid, spans)
    for thread in sorted({span.thread for span in spans}):
        of_thread = [span for span in spans if span.thread == thread and span.kind in ("forward", "backward")]
        name = "layers" if thread == 0 else f"layers, thread {thread}"
        _add(trace, pid, name, ((_times(span), (span, _facts(span, layers.get(span.name)))) for span in of_thread))
    _add(trace, pid, "sections", ((_times(span), (span, {"step": span.step})) for span in spans if span.kind == "section"))
    _add_saved(trace, Track(pid, 0), spans, layers)
    return trace


def _add_steps(trace: Trace, pid: int, spans: list[Span]) -> None:
    track = trace.track(pid, "steps")
    for step in sorted({span.step for span in spans}):
        of_step = [span for span in spans if span.step == step]
        begin, end = min(_times(span).start_us for span in of_step), max(_times(span).end_us for span in of_step)
        trace.span(track, f"step {step}", Times(begin, end - begin), {"step": step}, category="step")
        phases = ((_times(span), span) for span in of_step if span.kind == "phase" and span.name != "step")
        for lane, times, span in in_lanes(phases):
            if lane == 0:  # phases follow each other; one that overlaps another is not drawn
                trace.span(track, span.name, times, {"step": step}, category="phase")


def _add(trace: Trace, pid: int, name: str, spans: Iterable[tuple[Times, tuple[Span, dict[str, Any]]]]) -> None:
    tracks: list[Track] = []
    for lane, times, (span, facts) in in_lanes(spans):
        if lane == len(tracks):
            tracks.append(trace.track(pid, name if not lane else f"{name} ({lane + 1})"))
        layer = span.name or "(the model)"
        trace.span(tracks[lane], f"{layer} ↩" if span.kind == "backward" else layer, times, facts, category=span.kind)


def _facts(span: Span, layer: LayerCost | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"step": span.step, "direction": span.kind}
    if layer is not None:
        flops = layer.flops_forward if span.kind == "forward" else layer.flops_backward
        facts |= {"class": layer.kind, "FLOP per step": flops, "source": layer.source, "parameters (bytes)": layer.parameter_bytes}
    return {name: value for name, value in facts.items() if value not in ("", 0) or name == "step"}


def _add_saved(trace: Trace, track: Track, spans: list[Span], layers: dict[str, LayerCost]) -> None:
    """A layer's activations are saved from the end of its forward to the end of its backward."""
    ends: dict[tuple[int, str, str], float] = {}  # of each layer's last span of a kind in a step
    for span in spans:
        key = (span.step, span.kind, span.name)
        ends[key] = max(ends.get(key, 0.0), _times(span).end_us)
    changes: list[tuple[float, int]] = []
    for (step, kind, name), end in ends.items():
        if kind == "forward" and name in layers and (step, "backward", name) in ends and layers[name].memory_self_bytes:
            saved = layers[name].memory_self_bytes
            changes += [(end, saved), (ends[step, "backward", name], -saved)]
    total = 0
    for at_us, change in sorted(changes):
        total += change
        trace.counter(track, SAVED, at_us, max(total, 0))


def _times(span: Span) -> Times:
    return Times(span.start_ms * 1e3, span.duration_ms * 1e3)

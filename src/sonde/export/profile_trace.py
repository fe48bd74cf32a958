"""The measured steps of a profile as a trace: phases, every call of every layer forward and backward, sections, and what is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sonde.errors import SondeError
from sonde.export.trace import Times, Trace, Track, in_lanes

if TYPE_CHECKING:
    from sonde.profiler import LayerCost, ProfileReport, Span

KEPT = "activations kept for backward (bytes)"


def trace_of_profile(report: ProfileReport) -> Trace:
    """A trace of the steps whose spans were recorded."""
    spans = [span for span in report.spans if math.isfinite(span.start_ms) and span.duration_ms >= 0]
    if not spans:
        raise SondeError(
            "this profile holds no spans, only sums, so no trace can be made of it.\n"
            "Profile again: sonde profile -o trace.json.gz script.py, or Profiler().profile(model, inputs)"
        )
    about = {"profile": report.title, "batch": report.batch, "made by": "sonde profile", **report.environment}
    trace = Trace(about)
    pid = trace.process(f"profile of {report.title or 'a model'}", labels=report.batch)
    layers = {layer.path: layer for layer in report.layers}
    _add_steps(trace, pid, spans)
    for thread in sorted({span.thread for span in spans}):
        of_thread = [span for span in spans if span.thread == thread and span.kind in ("forward", "backward")]
        name = "layers" if thread == 0 else f"layers, thread {thread}"
        _add(trace, pid, name, ((_times(span), (span, _facts(span, layers.get(span.name)))) for span in of_thread))
    _add(trace, pid, "sections", ((_times(span), (span, {"step": span.step})) for span in spans if span.kind == "section"))
    _add_kept(trace, Track(pid, 0), spans, layers)
    return trace


def _add_steps(trace: Trace, pid: int, spans: list[Span]) -> None:
    track = trace.track(pid, "steps")
    for step in sorted({span.step for span in spans}):
        of_step = [span for span in spans if span.step == step]
        phases = [span for span in of_step if span.kind == "phase" and span.name != "step"]
        begin = min(span.start_ms for span in of_step)
        end = max(span.start_ms + span.duration_ms for span in of_step)
        trace.span(track, f"step {step}", Times(begin * 1e3, (end - begin) * 1e3), {"step": step}, category="step")
        for lane, times, span in in_lanes((_times(span), span) for span in phases):
            if lane == 0:  # phases follow each other; one that crosses another is told by the step alone
                trace.span(track, span.name, times, {"step": step}, category="phase")


def _add(trace: Trace, pid: int, name: str, spans: Iterable[tuple[Times, tuple[Span, dict[str, Any]]]]) -> None:
    tracks: list[Track] = []
    for lane, times, (span, facts) in in_lanes(spans):
        if lane == len(tracks):
            tracks.append(trace.track(pid, name if not lane else f"{name} ({lane + 1})"))
        trace.span(tracks[lane], _name(span), times, facts, category=span.kind)


def _name(span: Span) -> str:
    layer = span.name or "(the model)"
    return f"{layer} ↩" if span.kind == "backward" else layer


def _facts(span: Span, layer: LayerCost | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"step": span.step, "direction": span.kind}
    if layer is not None:
        flops = layer.flops_forward if span.kind == "forward" else layer.flops_backward
        facts |= {"class": layer.kind, "FLOP per step": flops, "source": layer.source, "parameters (bytes)": layer.parameter_bytes}
    return {name: value for name, value in facts.items() if value not in ("", 0) or name == "step"}


def _add_kept(trace: Trace, track: Track, spans: list[Span], layers: dict[str, LayerCost]) -> None:
    """What a layer keeps is there from the end of its forward to the end of its backward."""
    if not any(span.kind == "backward" for span in spans):
        return
    changes = sorted(_changes(spans, layers))
    kept = 0.0
    for at_us, change in changes:
        kept += change
        trace.counter(track, KEPT, at_us, max(round(kept), 0))


def _changes(spans: list[Span], layers: dict[str, LayerCost]) -> Iterator[tuple[float, float]]:
    last: dict[tuple[int, str, str], float] = {}  # where each layer's last span of a kind ends in a step
    for span in spans:
        if span.kind in ("forward", "backward"):
            key = (span.step, span.kind, span.name)
            last[key] = max(last.get(key, 0.0), span.start_ms + span.duration_ms)
    for (step, kind, name), end in last.items():
        layer = layers.get(name)
        if layer is not None and layer.memory_self_bytes and (step, "backward", name) in last and (step, "forward", name) in last:
            yield end * 1e3, float(layer.memory_self_bytes if kind == "forward" else -layer.memory_self_bytes)


def _times(span: Span) -> Times:
    return Times(span.start_ms * 1e3, span.duration_ms * 1e3)

"""Spans of a traced step, for a trace file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sonde.capture.layer_timing.layer_call_trace import OUTSIDE, LayerCall, LayerCallTrace
from sonde.capture.layer_timing.layer_times_from_trace import intervals
from sonde.profiler import Span
from sonde.profiler.module_listing import TimedModule


def spans(trace: LayerCallTrace, layers: list[TimedModule], step: int, zero: int) -> Iterator[Span]:
    """One span per forward call; in the backward, consecutive nodes of one call joined, nested in the spans of the calls around it."""

    def span(kind: str, name: str, start: int, end: int) -> Span:
        return Span(step, kind, name, (start - zero) / 1e6, (end - start) / 1e6)

    for call in trace.calls:
        if call.end >= 0:
            yield span("forward", layers[call.layer].path, call.start, call.end)
    open_calls: list[tuple[LayerCall, int]] = []
    last_end = 0
    for start, end, owner in intervals(trace):
        if start != last_end:  # the next backward pass
            yield from (span("backward", layers[call.layer].path, opened, last_end) for call, opened in open_calls)
            open_calls.clear()
        if owner is OUTSIDE:
            yield span("backward", "(loss)", start, end)
        chain = list(_with_ancestors(owner)) if owner.layer >= 0 else []
        num_common = _num_common(open_calls, chain)
        yield from (span("backward", layers[call.layer].path, opened, start) for call, opened in open_calls[num_common:])
        open_calls[num_common:] = [(call, start) for call in chain[num_common:]]
        last_end = end
    yield from (span("backward", layers[call.layer].path, opened, last_end) for call, opened in open_calls)


def _num_common(open_calls: list[tuple[LayerCall, int]], chain: list[LayerCall]) -> int:
    pairs = zip(open_calls, chain)
    return next((index for index, ((call, _), other) in enumerate(pairs) if call is not other), min(len(open_calls), len(chain)))


def _with_ancestors(call: LayerCall) -> Iterable[LayerCall]:
    """The call after all calls around it, the outermost first."""
    chain: list[LayerCall] = []
    ancestor: LayerCall | None = call
    while ancestor is not None:
        chain.append(ancestor)
        ancestor = ancestor.parent
    return reversed(chain)

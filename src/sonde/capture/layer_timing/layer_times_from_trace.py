"""Evaluates a trace: what the calls and autograd nodes of every layer cost, with and without the layers that it calls."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sonde.capture.layer_timing.layer_call_trace import ENGINE, OUTSIDE, PROFILER, LayerCall, LayerCallTrace


class ModuleCost(NamedTuple):
    """Cost of one layer in one step, in units of the trace's counter, including what the timers add."""

    calls: int = 0
    forward: int = 0
    forward_self: int = 0
    backward: int = 0
    backward_self: int = 0
    num_calls: int = 0  # of other modules, at any depth: the timer of each adds to `forward`
    num_calls_self: int = 0  # of other modules, by the layer itself: the timer of each adds to `forward_self`
    num_nodes: int = 0  # autograd nodes: the hook of each adds to `backward`
    num_nodes_self: int = 0  # the hook of each adds to `backward_self`


@dataclass(slots=True)
class LayerCosts:
    """Costs of all layers in one step, and of what belongs to no layer."""

    layers: dict[int, ModuleCost] = field(default_factory=dict)  # in the order of first calls
    loss_backward: int = 0  # nodes created outside of all modules
    engine: int = 0  # autograd, before the first node
    forward: int = 0  # all outermost calls
    backward: int = 0  # all backward passes, from start to end
    num_calls: int = 0  # without the outermost
    num_nodes: int = 0
    num_nodes_loss: int = 0


def evaluate(trace: LayerCallTrace) -> LayerCosts:
    """The costs of a trace that was stopped. May be called once per trace: it adds sums to its calls."""
    costs = LayerCosts()
    calls = [call for call in trace.calls if call.end >= 0 or call.start < 0]
    _add_up_backward(trace, costs)
    for call in reversed(calls):
        call.backward_total += call.backward
        call.num_nodes_total += call.num_nodes
        if (parent := call.parent) is not None:
            parent.children += call.end - call.start
            parent.num_children += 1
            parent.num_descendants += call.num_descendants + 1
            parent.backward_total += call.backward_total
            parent.num_nodes_total += call.num_nodes_total
    rows: dict[int, list[int]] = {}
    for call in calls:
        row = rows.setdefault(call.layer, [0] * len(ModuleCost._fields))
        duration = call.end - call.start
        own = (int(call.end >= 0), 0, duration - call.children, 0, call.backward, 0, call.num_children, 0, call.num_nodes)
        total = (0, duration, 0, call.backward_total, 0, call.num_descendants, 0, call.num_nodes_total, 0)
        for values in (own, total) if not _is_recursive(call) else (own,):
            for index, value in enumerate(values):
                row[index] += value
        if call.parent is None:
            costs.forward += duration
            costs.num_calls += call.num_descendants
    costs.layers = {layer: ModuleCost(*row) for layer, row in rows.items()}
    costs.backward = sum(end - trace.marks[first][0] for first, _, end in trace.backwards)
    return costs


def _add_up_backward(trace: LayerCallTrace, costs: LayerCosts) -> None:
    for start, end, owner in intervals(trace):
        duration = end - start
        costs.num_nodes += 1
        if owner is ENGINE:
            costs.engine += duration
        elif owner is OUTSIDE:
            costs.loss_backward += duration
            costs.num_nodes_loss += 1
        elif owner is not PROFILER:
            owner.backward += duration
            owner.num_nodes += 1


def intervals(trace: LayerCallTrace) -> Iterator[tuple[int, int, LayerCall]]:
    """Start, end and owner of each mark: it ends where the next mark of the same backward starts."""
    for first, after, end in trace.backwards:
        for index in range(first, after):
            start, owner = trace.marks[index]
            yield start, trace.marks[index + 1][0] if index + 1 < after else end, owner


def _is_recursive(call: LayerCall) -> bool:
    """True for a call inside another call of the same module: the outer one already includes it."""
    ancestor = call.parent
    while ancestor is not None:
        if ancestor.layer == call.layer:
            return True
        ancestor = ancestor.parent
    return False

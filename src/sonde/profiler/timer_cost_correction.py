"""Taking off what the measuring added to timed steps, so that many small layers do not look larger than they are.

The sum is known: bare and timed steps took turns, and the difference of their forwards is what all the doors added. It is laid evenly on
the calls. Where layers are large the difference is mostly chance, so it may not be far from what a door costs on its own; in a step
that does more than opening doors it costs rather more than in a loop that does nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from sonde.profiler.layer_costs import Cost, Figures
from sonde.profiler.step_recording import Recorded

LEAST, MOST = 0.5, 4.0  # times what it costs on its own: in cold caches up to three times were seen


def corrected(recorded: Recorded) -> list[Figures]:
    """The timed steps as they would have been."""
    door = _each(recorded, "forward", recorded.door_ns, lambda step: step.forward, lambda step: step.num_calls)
    node = _each(recorded, "backward", recorded.node_ns, lambda step: step.backward, lambda step: step.num_nodes)
    return [_step(step, door, node) for step in recorded.timed]


def _each(recorded: Recorded, phase: str, alone: int, took: Callable[[Figures], int], num: Callable[[Figures], int]) -> float:
    steps = [step for step in recorded.timed if num(step)]
    if not steps or not recorded.bare:
        return 0.0
    bare_ms = statistics.median(step.get(phase, 0.0) for step in recorded.bare)
    added = statistics.median(map(took, steps)) - bare_ms * 1e6
    return min(max(added / statistics.median(map(num, steps)), LEAST * alone), MOST * alone)


def _step(step: Figures, door: float, node: float) -> Figures:
    layers = {layer: _cost(cost, door, node) for layer, cost in step.layers.items()}
    loss = max(0, int(step.loss_backward - node * step.num_nodes_loss))
    return Figures(layers, loss, step.engine, step.forward, step.backward, step.num_calls, step.num_nodes, step.num_nodes_loss)


def _cost(cost: Cost, door: float, node: float) -> Cost:
    return cost._replace(
        forward=max(0, int(cost.forward - door * cost.num_calls)),
        forward_self=max(0, int(cost.forward_self - door * cost.num_calls_self)),
        backward=max(0, int(cost.backward - node * cost.num_nodes)),
        backward_self=max(0, int(cost.backward_self - node * cost.num_nodes_self)),
    )

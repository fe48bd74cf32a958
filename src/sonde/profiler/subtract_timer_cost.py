"""Subtracts the cost of the timers from the timed steps, so that many small layers do not look larger than they are.

In a loop of their own the timers cost less than in a real step, where caches are cold. The steps themselves show how much less: bare steps
(timers on the outermost modules) and timed steps (timers on all modules and nodes) alternate, and the difference of their forward times is
what the timers of the inner modules add. The ratio of that difference to the cost in a loop scales the costs. With large layers the
difference is mostly noise, so the ratio is limited.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

from sonde.capture.layer_timing.layer_times_from_trace import LayerCosts, ModuleCost
from sonde.profiler.measure_timer_cost import TimerCost
from sonde.profiler.record_steps import StepRecordings

MIN_RATIO, MAX_RATIO = 0.5, 4.0  # of the cost in a step to the cost in a loop: up to 3 was measured with cold caches


def without_timer_cost(recordings: StepRecordings) -> list[LayerCosts]:
    """The timed steps as they would be without timers."""
    alone = recordings.timer_cost
    calls = _ratio(recordings, "forward", alone.timed_call, lambda step: step.forward, lambda step: step.num_calls)
    nodes = _ratio(recordings, "backward", alone.node, lambda step: step.backward, lambda step: step.num_nodes)
    cost = TimerCost(alone.timed_call * calls, alone.inside_call * calls, alone.node * nodes)
    return [_timed_step(step, cost) for step in recordings.timed]


def _ratio(
    recordings: StepRecordings, phase: str, alone: float, duration: Callable[[LayerCosts], int], num: Callable[[LayerCosts], int]
) -> float:
    """Cost of a timer in these steps over its cost in a loop (`alone`)."""
    steps = [step for step in recordings.timed if num(step)]
    if not steps or not recordings.bare or alone <= 0:
        return 1.0
    bare_ms = statistics.median(step.get(phase, 0.0) for step in recordings.bare)
    added = statistics.median(map(duration, steps)) - bare_ms * 1e6
    return min(max(added / statistics.median(map(num, steps)) / alone, MIN_RATIO), MAX_RATIO)


def _timed_step(step: LayerCosts, cost: TimerCost) -> LayerCosts:
    layers = {layer: _module(module, cost) for layer, module in step.layers.items()}
    return replace(step, layers=layers, loss_backward=max(0, int(step.loss_backward - cost.node * step.num_nodes_loss)))


def _module(module: ModuleCost, cost: TimerCost) -> ModuleCost:
    own = cost.inside_call * module.calls
    outside_call = cost.timed_call - cost.inside_call  # what the timer of an inner module adds to its caller alone
    return module._replace(
        forward=max(0, int(module.forward - own - cost.timed_call * module.num_calls)),
        forward_self=max(0, int(module.forward_self - own - outside_call * module.num_calls_self)),
        backward=max(0, int(module.backward - cost.node * module.num_nodes)),
        backward_self=max(0, int(module.backward_self - cost.node * module.num_nodes_self)),
    )

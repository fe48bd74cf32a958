"""What the timers of a profile cost: measured once per process and clock, and subtracted from the timed steps.

In a loop of their own the timers cost less than in a real step, where caches are cold. Bare steps (timers on the outermost modules) and
timed steps (timers on all modules and nodes) alternate; the ratio of the difference of their forward times to the cost in a loop scales the
costs. With large layers the difference is mostly noise, so the ratio is limited.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from sonde.capture.layer_timing.autograd_node_timers import AutogradNodeTimers
from sonde.capture.layer_timing.forward_timers import ModuleTimers
from sonde.capture.layer_timing.layer_call_trace import LayerCallTrace, ReadCounter
from sonde.capture.layer_timing.layer_times_from_trace import LayerCosts, ModuleCost

NUM_CALLS = 64  # of a module per repetition, and nodes of a graph
REPEATS = 12
MIN_RATIO, MAX_RATIO = 0.5, 4.0  # of the cost in a step to the cost in a loop: up to 3 was measured with cold caches


class TimerCost(NamedTuple):
    """Nanoseconds that the profiler adds."""

    timed_call: float = 0.0  # a call of a module with a timer, to the time of its caller
    inside_call: float = 0.0  # the same, to the time of the module itself: the part between its two readings
    node: float = 0.0  # an autograd node with a pre-hook


@cache
def timer_cost(read: ReadCounter) -> TimerCost:
    module, value = nn.Identity(), torch.empty(0, device="cpu")
    timers = ModuleTimers([module])
    inside: list[int] = []

    def calls(call: Callable[[torch.Tensor], torch.Tensor]) -> int:
        start = read()
        for _ in range(NUM_CALLS):
            call(value)
        return read() - start

    def timed() -> int:
        trace = LayerCallTrace(read)
        trace.start()
        with timers.installed(trace, only_roots=False):
            duration = calls(module)
        inside.extend(call.end - call.start for call in trace.calls)
        return duration

    bare_forward = min(calls(module.forward) for _ in range(REPEATS)) // NUM_CALLS
    timed_call = _difference(lambda: calls(module), timed)
    inside_call = min(timed_call, max(0, int(statistics.median(inside)) - bare_forward))
    return TimerCost(timed_call, inside_call, _node_cost(read))


def _node_cost(read: ReadCounter) -> int:
    leaf = torch.zeros(1, requires_grad=True, device="cpu")

    def chain() -> torch.Tensor:
        value = leaf
        for _ in range(NUM_CALLS):
            value = value.view(1)
        return value

    def backward(value: torch.Tensor) -> int:
        start = read()
        torch.autograd.grad(value, leaf)  # not backward(): a session would record it
        return read() - start

    def hooked() -> int:
        value = chain()
        trace = LayerCallTrace(read)
        trace.start()
        AutogradNodeTimers(trace).install([value])
        trace.start_backward()
        return backward(value)

    with torch.enable_grad():
        return _difference(lambda: backward(chain()), hooked)


def _difference(bare: Callable[[], int], measured: Callable[[], int]) -> int:
    """Per call; both alternate, and the minimum of each is compared: other programs can only make a repetition longer."""
    durations = [(bare(), measured()) for _ in range(REPEATS)]
    return max(0, (min(each for _, each in durations) - min(each for each, _ in durations)) // NUM_CALLS)


def without_timer_cost(timed: list[LayerCosts], bare: list[dict[str, float]], alone: TimerCost) -> list[LayerCosts]:
    """The timed steps as they would be without timers. `bare` has the milliseconds of bare steps by phase, `alone` the costs in a loop."""
    calls = _ratio([(step.forward, step.num_calls) for step in timed], [step.get("forward", 0.0) for step in bare], alone.timed_call)
    nodes = _ratio([(step.backward, step.num_nodes) for step in timed], [step.get("backward", 0.0) for step in bare], alone.node)
    cost = TimerCost(alone.timed_call * calls, alone.inside_call * calls, alone.node * nodes)
    return [
        replace(
            step, layers={layer: _module(module, cost) for layer, module in step.layers.items()},
            loss_backward=max(0, int(step.loss_backward - cost.node * step.num_nodes_loss)),
        )
        for step in timed
    ]  # fmt: skip


def _ratio(timed: list[tuple[int, int]], bare_ms: list[float], alone: float) -> float:
    """Cost of a timer in these steps over its cost in a loop (`alone`). `timed` has the duration and the number of timers of each step."""
    steps = [step for step in timed if step[1]]
    if not steps or not bare_ms or alone <= 0:
        return 1.0
    added = statistics.median(duration for duration, _ in steps) - statistics.median(bare_ms) * 1e6
    return min(max(added / statistics.median(num for _, num in steps) / alone, MIN_RATIO), MAX_RATIO)


def _module(module: ModuleCost, cost: TimerCost) -> ModuleCost:
    own = cost.inside_call * module.calls
    outside_call = cost.timed_call - cost.inside_call  # what the timer of an inner module adds to its caller alone
    return module._replace(
        forward=max(0, int(module.forward - own - cost.timed_call * module.num_calls)),
        forward_self=max(0, int(module.forward_self - own - outside_call * module.num_calls_self)),
        backward=max(0, int(module.backward - cost.node * module.num_nodes)),
        backward_self=max(0, int(module.backward_self - cost.node * module.num_nodes_self)),
    )

"""Measures what the timers themselves cost, once per process and clock; subtract_timer_cost.py subtracts it from the results."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from sonde.capture.layer_timing.autograd_node_timers import AutogradNodeTimers
from sonde.capture.layer_timing.layer_call_trace import LayerCallTrace, ReadCounter
from sonde.capture.layer_timing.module_timers import ModuleTimers

NUM_CALLS = 64  # of a module per repetition, and nodes of a graph
REPEATS = 12


class TimerCost(NamedTuple):
    """Nanoseconds that the profiler adds."""

    timed_call: float = 0.0  # a call of a module with a timer, to the time of its caller
    inside_call: float = 0.0  # the same, to the time of the module itself: the part between its two readings
    node: float = 0.0  # an autograd node with a pre-hook


@cache
def timer_cost(read: ReadCounter) -> TimerCost:
    """The cost of each timer with this clock."""
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

    def bare() -> int:
        return _backward(chain(), leaf, read)

    def hooked() -> int:
        value = chain()
        trace = LayerCallTrace(read)
        trace.start()
        AutogradNodeTimers(trace).install([value])
        trace.start_backward()
        return _backward(value, leaf, read)

    with torch.enable_grad():
        return _difference(bare, hooked)


def _backward(value: torch.Tensor, leaf: torch.Tensor, read: ReadCounter) -> int:
    start = read()
    torch.autograd.grad(value, leaf)  # not backward(): a session would record it
    return read() - start


def _difference(bare: Callable[[], int], measured: Callable[[], int]) -> int:
    """Per call; both alternate, and the minimum of each is compared: other programs can only make a repetition longer."""
    durations = [(bare(), measured()) for _ in range(REPEATS)]
    return max(0, (min(each for _, each in durations) - min(each for each, _ in durations)) // NUM_CALLS)

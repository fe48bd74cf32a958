"""What the measuring itself takes, once per process: it is taken off again, so that many small layers do not look larger than they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from sonde.profiler.autograd_node_timers import Nodes
from sonde.profiler.module_timers import Doors
from sonde.profiler.time_trace import Read, Tape

NUM = 64  # calls, and nodes of a graph
REPEATS = 12


@cache
def door_ns(read: Read) -> int:
    """What one call through a door adds to whoever makes it, with two readings of this clock."""
    module, value = nn.Identity(), torch.empty(0, device="cpu")
    doors = Doors({"": module}, eager=True)

    def calls() -> int:
        began = read()
        for _ in range(NUM):
            module(value)
        return read() - began

    def measured() -> int:
        tape = Tape(read)
        tape.start()
        with doors.open(tape, roots_alone=False):
            return calls()

    return _added(calls, measured)


@cache
def node_ns(read: Read) -> int:
    """What the mark of one node adds to it."""
    leaf = torch.zeros(1, requires_grad=True, device="cpu")

    def chain() -> torch.Tensor:
        value = leaf
        for _ in range(NUM):
            value = value.view(1)
        return value

    def bare() -> int:
        return _backward(chain(), leaf, read)

    def measured() -> int:
        value = chain()
        tape = Tape(read)
        tape.start()
        nodes = Nodes(tape)
        nodes.hook([value])
        tape.backward_begins()
        return _backward(value, leaf, read)

    with torch.enable_grad():
        return _added(bare, measured)


def _backward(value: torch.Tensor, leaf: torch.Tensor, read: Read) -> int:
    began = read()
    torch.autograd.grad(value, leaf)  # not backward(): sessions listen to that
    return read() - began


def _added(bare: Callable[[], int], measured: Callable[[], int]) -> int:
    """Per call, in turns, the least of several: whatever disturbs only adds."""
    turns = [(bare(), measured()) for _ in range(REPEATS)]
    return max(0, (min(with_it for _, with_it in turns) - min(without for without, _ in turns)) // NUM)

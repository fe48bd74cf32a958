"""The quick way through an ordinary step: the native kernel takes those of the loop's calls in which nothing is to be observed.

Everything is done to the same objects as in `Loop`, so the two may take turns within a step. Where the kernel was not built, or something
about a call is unusual, the loop's own methods are the way.

What the kernel reads in every step has a slot in its class (`__slots__`, beside the dictionary that holds the rest): then it knows its
place, and need not look it up in memory that the training has driven out of the caches since the step before.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import torch

from sonde.capture import overhead_budget
from sonde.capture.call_site import is_library
from sonde.capture.learning_rates import MOST, scalar_name
from sonde.capture.replay_buffer import ForwardCall
from sonde.capture.step_profiler import step_profiler
from sonde.runlog import writer
from sonde.statistics import native

if TYPE_CHECKING:
    from sonde.capture.step_tracker import Loop

try:
    from sonde.capture._kernel import Beat
    from sonde.capture._kernel import Latch as Latch
except ImportError:  # built without a compiler
    Beat, Latch = None, threading.RLock  # type: ignore[assignment,misc]

CALLS = (
    "fetch_begins", "fetch_ended", "zero_grad", "forward_begins", "forward_ended", "backward_begins", "backward_ended", "optimizer_begins",
    "optimizer_ended", "clipped", "scheduler_stepped",
)  # fmt: skip


def quicken(loop: Loop) -> bool:
    """From now on the loop's calls go through the native kernel first. False: there is none."""
    # Its clock is that of Python on Linux, and its records are written as they lie in memory.
    if Beat is None or not native.ENABLED or sys.platform != "linux" or sys.byteorder != "little":
        return False
    beat = Beat(
        loop, loop._phases, clock=loop.clock, ledger=loop.ledger, kept=loop.kept, losses=loop._losses, lines=loop._lines,
        guard=loop._guard, spikes=loop._spikes, evaluations=loop._evaluations, models=loop._models, governor=loop._governor,
        xray=loop.xray, journal=loop._journal, writer=loop._journal.writer, far=loop._far,
        panel=loop._panel, course=loop._course,
        graph_task=torch._C._current_graph_task_id, tracing=torch._C._get_tracing_state, grad_enabled=torch.is_grad_enabled,
        rng_state=torch.default_generator.get_state, is_library=is_library, call_type=ForwardCall,
        constants=(
            overhead_budget.AIM, overhead_budget.LEAST_SHARE, overhead_budget.START_NS, overhead_budget.MEMORY, overhead_budget.LONG_MEMORY,
            step_profiler.SLOW, step_profiler.SLOW_NS, step_profiler.LIGHT_NS, step_profiler.MEMORY,
        ),
        writer_globals=vars(writer), os_write=os.write,
        rate_names=tuple(scalar_name(1, index) for index in range(1, MOST + 1)),
    )  # fmt: skip
    for name in CALLS:
        setattr(loop, name, getattr(beat, name))  # in front of the method of its class, which the kernel calls where it does not go on
    return True

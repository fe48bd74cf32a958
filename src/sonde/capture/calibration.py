"""What a hook costs before it does anything, measured once per process: a module with hooks takes a slower way through torch.

Sonde times its own code, but not torch's way to it. These figures make the reported cost honest.
"""

from __future__ import annotations

from functools import cache
from time import perf_counter_ns

import torch
from torch import nn

_NUM_CALLS = 200


@cache
def hook_ns() -> float:
    """A forward hook on a module, per call."""
    module, value = nn.Identity(), torch.empty(0, device="cpu")
    bare = _best(lambda: module(value))
    handle = module.register_forward_hook(lambda *_: None)
    hooked = _best(lambda: module(value))
    handle.remove()
    return max(0.0, hooked - bare)


@cache
def gradient_hook_ns() -> float:
    """A call from autograd into Python; taken as a forward hook's, which measures close to it without running a backward of our own."""
    return hook_ns()


def _best(call: object) -> float:
    assert callable(call)
    best = float("inf")
    for _ in range(5):
        started = perf_counter_ns()
        for _ in range(_NUM_CALLS // 5):
            call()
        best = min(best, (perf_counter_ns() - started) / (_NUM_CALLS // 5))
    return best

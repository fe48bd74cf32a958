"""Which steps are observed: as many as the overhead budget allows.

Every step adds the budgeted share of the training's own time to a balance, less the cost of the work that is done at every step; an
observed step subtracts what observing costs. A new run starts with a small balance, so that the first steps, in which most faults already
show, are observed one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter_ns

import torch
from torch import nn

FIRST_STEPS = 3  # always observed, at the start and after a change: what goes wrong there must not be missed for being slow
START_NS = 10_000_000  # 10 ms: half a dozen observed steps of a small model, nothing beside starting Python
AIM = 0.75  # of the budget is spent: it is a limit, and what a step costs is known only afterwards
LEAST_SHARE = 0.25  # of the budget goes to observing even where the ever-present work uses more: a blind debugger is worth nothing
DEEPEST_DEBT = 2.0  # observed steps: one that was slow by chance must not blind us for long
MEMORY = 0.8  # of the running averages, per step
LONG_MEMORY = 0.95  # of those of the training's own time, which vary more


@dataclass(slots=True)
class OverheadBudget:
    budget: float
    every: int | None = None
    at_least_every: int | None = None  # steps: these are observed at any price
    sampling_rate: float = 1.0  # share of the others that is observed
    _sampled: float = 0.0  # grows by that share; a whole one is a step
    _set_up: bool = False  # the first observed step is over
    _num_owed: int = FIRST_STEPS  # steps to be observed whatever the balance is
    _balance_ns: float = START_NS
    _observed_ns: float = 0.0  # what observing a step costs on top, running average
    _plain_ns: float = 0.0  # what every step costs, running average
    _rest_ns: dict[bool, float] = field(default_factory=dict)  # the training's own time, running averages: on observed steps, on others

    def on_step_end(self, *, step_ns: float, own_ns: float, observed: bool) -> None:
        if observed and not self._set_up:
            self._set_up = True  # planning names and rows happens once: that price says nothing about the steps to come
        elif observed:
            extra = self._extra_ns(own_ns)
            self._observed_ns = extra if not self._observed_ns else MEMORY * self._observed_ns + (1 - MEMORY) * extra
            self._balance_ns = max(self._balance_ns - extra, -DEEPEST_DEBT * self._observed_ns)
        else:
            self._plain_ns = own_ns if not self._plain_ns else MEMORY * self._plain_ns + (1 - MEMORY) * own_ns
        rest_ns = max(0.0, step_ns - own_ns)
        known_ns = self._rest_ns.setdefault(observed, rest_ns)
        self._rest_ns[observed] = LONG_MEMORY * known_ns + (1 - LONG_MEMORY) * min(rest_ns, 2 * known_ns)  # not by a pause of the user's
        income = AIM * self.budget * rest_ns
        self._balance_ns += max(income - self._plain_ns, LEAST_SHARE * income)
        # Savings are capped: a long pause (validation, a checkpoint) must not buy a burst of slow steps.
        self._balance_ns = min(self._balance_ns, START_NS + 2 * self._observed_ns)

    def _extra_ns(self, own_ns: float) -> float:
        """What observing this step cost on top of what every step costs."""
        if own_ns < self._plain_ns:
            # Steps that are not observed were slow by chance (a disk, another process). If this one then counted as free, so would the
            # next, and no other kind would ever come to correct it.
            self._plain_ns = own_ns
            return self._observed_ns or own_ns
        extra = own_ns - self._plain_ns
        return extra + self._hidden_ns(extra)

    def _hidden_ns(self, seen_ns: float) -> float:
        """What our clock cannot see, because the training pays it: caches that measuring has emptied. At most as much as it can see."""
        if len(self._rest_ns) < 2:
            return 0.0
        return min(max(0.0, self._rest_ns[True] - self._rest_ns[False]), seen_ns)

    def observe_closely(self) -> None:
        """Something changed: the next steps are worth their price."""
        self._num_owed = FIRST_STEPS

    def should_observe(self, step: int) -> bool:
        """Whether this step is observed."""
        if self.every is not None:
            return step % self.every == 0
        if self._num_owed:
            self._num_owed -= 1
            return True
        if self.at_least_every is not None and step % self.at_least_every == 0:
            return True
        return self._is_sampled() if is_milestone(step) or self._balance_ns >= self._observed_ns else False

    def _is_sampled(self) -> bool:
        """Evenly spread, without a random number: the user's generators are not ours."""
        self._sampled += self.sampling_rate
        if self._sampled < 1 - 1e-9:
            return False
        self._sampled -= 1
        return True


def is_milestone(step: int) -> bool:
    """4, 6, 8, 12, 16, 24, 32 …: two in every doubling are observed at any price, so that no part of a run goes unseen altogether."""
    while step > 3 and step % 2 == 0:
        step //= 2
    return step in (1, 2, 3)


_NUM_CALLS = 200


@cache
def hook_ns() -> float:
    """What torch takes to call a forward hook, in nanoseconds, measured once per process: a module with hooks takes a slower path through
    torch. Sonde times its own code, but not torch's way to it; this makes the reported cost honest."""
    module, value = nn.Identity(), torch.empty(0, device="cpu")
    bare = _best(lambda: module(value))
    handle = module.register_forward_hook(lambda *_: None)
    hooked = _best(lambda: module(value))
    handle.remove()
    return max(0.0, hooked - bare)


def _best(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(5):
        started = perf_counter_ns()
        for _ in range(_NUM_CALLS // 5):
            call()
        best = min(best, (perf_counter_ns() - started) / (_NUM_CALLS // 5))
    return best

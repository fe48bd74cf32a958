"""Decides which steps are observed, within the overhead budget.

Every step adds the budgeted share of the training's own time to a balance, minus the cost of the work at every step; an observed step
subtracts the cost of observing. A new run starts with a small balance, so that the first steps are observed one by one.
"""

import timeit
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn

FIRST_STEPS = 3  # always observed, at the start and after a change: faults there must not be missed
START_NS = 10_000_000  # 10 ms: half a dozen observed steps of a small model, negligible compared to the start of Python
TARGET = 0.75  # share of the budget to spend: it is a limit, and the cost of a step is known only afterwards
MIN_SHARE = 0.25  # of the budget is spent on observing even if the work at every step uses more: otherwise nothing would be observed
MAX_DEBT = 2.0  # observed steps: one that was slow by chance must not prevent observing for long
MEMORY = 0.8  # of the running averages, per step
MAX_DUE = 8.0  # steps that the sampling rate asks for and the balance did not allow; more are not made up for
LONG_MEMORY = 0.95  # of those of the training's own time, which vary more


@dataclass(slots=True)
class OverheadBudget:
    """Balance of the time that Sonde may use, and the decision for each step."""

    budget: float
    every: int | None = None
    at_least_every: int | None = None  # steps: these are observed at any cost
    sampling_rate: float = 1.0  # share of all steps that are observed, if the balance allows it
    _num_due: float = 0.0  # the sampling rate, summed over all steps, minus the observed steps
    _set_up: bool = False  # the first observed step is over
    _num_owed: int = FIRST_STEPS  # steps to observe regardless of the balance
    _balance_ns: float = START_NS
    _observed_ns: float = 0.0  # additional cost of an observed step, running average
    _plain_ns: float = 0.0  # cost of a step that is not observed, running average
    _was_observed: bool = False  # the last step
    _rest_ns: dict[bool, float] = field(default_factory=dict)  # the training's own time, running averages for observed and other steps

    def on_step_end(self, *, step_ns: float, own_ns: float, observed: bool) -> None:
        if observed and not self._set_up:
            self._set_up = True  # names and rows are planned once: this cost does not recur
        elif observed:
            extra = self._extra_ns(own_ns)
            self._observed_ns = extra if not self._observed_ns else MEMORY * self._observed_ns + (1 - MEMORY) * extra
            self._balance_ns = max(self._balance_ns - extra, -MAX_DEBT * self._observed_ns)
        else:
            known_ns = self._plain_ns or own_ns
            self._plain_ns = MEMORY * known_ns + (1 - MEMORY) * min(own_ns, 2 * known_ns)  # limits the effect of a step slow by chance
        self._was_observed = observed
        rest_ns = max(0.0, step_ns - own_ns)
        known_ns = self._rest_ns.setdefault(observed, rest_ns)
        self._rest_ns[observed] = LONG_MEMORY * known_ns + (1 - LONG_MEMORY) * min(rest_ns, 2 * known_ns)  # limits the effect of a pause
        income = TARGET * self.budget * rest_ns
        self._balance_ns += max(income - self._plain_ns, MIN_SHARE * income)
        # The balance is capped: a long pause (validation, a checkpoint) must not pay for a burst of slow steps.
        self._balance_ns = min(self._balance_ns, START_NS + 2 * self._observed_ns)

    def _extra_ns(self, own_ns: float) -> float:
        """The additional cost of observing this step."""
        if own_ns < self._plain_ns:
            # Unobserved steps were slow by chance (a disk, another process). If this step then counted as free, so would the next ones,
            # and no unobserved step would ever correct the average.
            self._plain_ns = own_ns
            return self._observed_ns or own_ns
        extra = own_ns - self._plain_ns
        if len(self._rest_ns) == 2:  # measuring evicts the training's data from caches, which costs at most as much again
            extra += min(max(0.0, self._rest_ns[True] - self._rest_ns[False]), extra)
        # After an observed step, what other steps cost was not measured again: if it seems too high, observing would seem free for ever.
        return max(extra, self._observed_ns) if self._was_observed else extra

    def observe_closely(self) -> None:
        """Observe the next steps, because something changed."""
        self._num_owed = FIRST_STEPS

    def should_observe(self, step: int) -> bool:
        """Whether to observe this step."""
        if self.every is not None:
            return step % self.every == 0
        # Evenly spread, without a random number: the user's generators must not change. A step that the balance does not allow is made up
        # for by a later one.
        self._num_due = min(self._num_due + self.sampling_rate, MAX_DUE)
        is_observed = self._is_required(step) or (
            self._num_due >= 1 - 1e-9 and (is_milestone(step) or self._balance_ns >= self._observed_ns)
        )
        self._num_due -= is_observed
        return is_observed

    def _is_required(self, step: int) -> bool:
        """Whether the step is observed at any cost and at any sampling rate."""
        if self._num_owed:
            self._num_owed -= 1
            return True
        return self.at_least_every is not None and step % self.at_least_every == 0


def is_milestone(step: int) -> bool:
    """4, 6, 8, 12, 16, 24, 32 …: two in every doubling are observed at any cost, so that every part of a run has observed steps."""
    while step > 3 and step % 2 == 0:
        step //= 2
    return step in (1, 2, 3)


@cache
def hook_ns() -> float:
    """Nanoseconds that torch needs to call a forward hook, measured once per process: added to the reported cost, since Sonde times its own
    code only."""
    module, value = nn.Identity(), torch.empty(0, device="cpu")
    bare = _best(lambda: module(value))
    handle = module.register_forward_hook(lambda *_: None)
    hooked = _best(lambda: module(value))
    handle.remove()
    return max(0.0, hooked - bare)


def _best(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=40, repeat=5)) / 40 * 1e9

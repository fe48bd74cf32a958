"""When is a number a spike? A robust answer in a few comparisons, for the training loop and for the rules alike.

The last values are kept, and from them a bound: how far above the usual may the next one be? A healthy training is noisy, has heavy tails,
restarts its learning rate and meets hard samples; so the bound follows the high values of the recent past, not their mean.
"""

from __future__ import annotations

from math import inf, log
from typing import NamedTuple

WINDOW = 64  # values that make the usual: a hundred would remember a level that the training has long left
ENOUGH = 32  # values before anything is a spike: the first steps leap for good reasons (warm-up, batch norm, a fresh Adam)
RENEWED = 16  # values between two looks at the window: sorting it at every step would be most of the cost
CALM = 16  # values below the bound before the next spike counts as another one
TAIL = 20  # one value in so many may be as odd as it likes without moving the bound: an earlier spike does not hide the next
NUM_FIRST = 5  # values that make the level at which the training began

# How far is far, in units of (high values of the window - median). Chosen on healthy programs: see docs/decisions/0011.
LOSS_SPREADS = 10.0
LOSS_RISE = 0.5  # of the median's size: a loss that is steady to the last digit may move by ten spreads and mean nothing
LOSS_LOST = 0.25  # of what has been learnt since the start: near zero every hard sample multiplies the loss, and nothing is lost
NORM_SPREADS = 4.0  # in logarithms
NORM_RISE = log(20.0)  # gradient norms of healthy batches differ by factors of two to ten


class Leap(NamedTuple):
    """A value that left its usual range, and that range."""

    value: float
    usual: float  # the median
    low: float  # of the values before it, but for the oddest on either side
    high: float
    bound: float  # above it a value is a spike


class Recent:
    """The recent values of one number. Subclasses say how far is far."""

    __slots__ = ("_place", "_values", "bound", "first", "high", "low", "median", "num", "quiet_until")

    def __init__(self) -> None:
        self._values: list[float] = []
        self._place = 0
        self.num = 0
        self.quiet_until = 0
        self.bound = inf
        self.median = self.low = self.high = self.first = 0.0

    def see(self, value: float) -> Leap | None:
        """Takes the next value, which is finite; answers where it is a spike that has just begun."""
        self.num += 1
        leap = self._leap(value) if value > self.bound else None
        values, place = self._values, self._place
        if place == len(values):
            values.append(value)
        else:
            values[place] = value
        self._place = place = (place + 1) % WINDOW
        if not place % RENEWED:
            self._renew()
        return leap

    def _leap(self, value: float) -> Leap | None:
        self._renew()  # the bound may be a few values old
        if value <= self.bound:
            return None
        begins = self.num > self.quiet_until
        self.quiet_until = self.num + CALM
        return Leap(value, self.median, self.low, self.high, self.bound) if begins else None

    def _renew(self) -> None:
        ordered = sorted(self._values)
        num = len(ordered)
        if self.num <= WINDOW and num >= NUM_FIRST:
            self.first = sorted(self._values[:NUM_FIRST])[NUM_FIRST // 2]
        if num >= ENOUGH:
            tail = num // TAIL
            self.median, self.low, self.high = ordered[num // 2], ordered[tail], ordered[-1 - tail]
            self.bound = self._bound()

    def _bound(self) -> float:
        raise NotImplementedError


class Losses(Recent):
    """Of one loss, which may be negative or near zero."""

    __slots__ = ()

    def _bound(self) -> float:
        median = self.median
        return median + max(LOSS_SPREADS * (self.high - median), LOSS_RISE * abs(median), LOSS_LOST * (self.first - median))


class Norms(Recent):
    """Of the logarithm of a gradient norm, which is above zero."""

    __slots__ = ()

    def _bound(self) -> float:
        return self.median + max(NORM_SPREADS * (self.high - self.median), NORM_RISE)

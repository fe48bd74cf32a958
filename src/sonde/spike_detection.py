"""Detects spikes in a series of numbers with a robust bound over a sliding window, for the training loop and for the rules.

The bound is computed from the last values. A healthy training is noisy, has heavy tails, restarts its learning rate and contains hard
samples; so the bound follows the high values of the window, not their mean.
"""

from math import inf, log
from typing import NamedTuple

WINDOW = 64  # values: a window of a hundred contains a level that the training left long ago
ENOUGH = 32  # values before anything is a spike: the first steps jump for good reasons (warm-up, batch norm, a fresh Adam)
UPDATE_EVERY = 16  # values between two updates of the bound: sorting the window at every step would be most of the cost
CALM = 16  # values below the bound before the next spike counts as another one
TAIL = 20  # the most extreme value in so many does not move the bound, so an earlier spike does not hide the next
NUM_FIRST = 5  # values whose median is the level at the start of the training

# Factors for (high value of the window - median), chosen on healthy programs: see docs/decisions/0011.
LOSS_SPREADS = 10.0
LOSS_RISE = 0.5  # of the median's magnitude: a loss that is constant to the last digit may move by ten spreads and mean nothing
LOSS_LOST = 0.25  # of the decrease since the start: near zero every hard sample multiplies the loss without any loss of progress
SPREADS = 4.0  # of logarithms and shares
NORM_RISE = log(20.0)  # gradient norms of healthy batches differ by factors of two to ten


class Spike(NamedTuple):
    """A value above its usual range, and that range. The field names are keys in recorded events."""

    value: float
    usual: float  # the median
    low: float  # of the values before it, without the most extreme ones on either side
    high: float
    bound: float  # values above it are spikes


class RollingBound:
    """Bound above which the next value of a series is a spike; subclasses compute it from the window's order statistics."""

    __slots__ = ("_index", "_values", "bound", "first", "high", "low", "median", "num", "quiet_until")

    def __init__(self) -> None:
        self._values: list[float] = []
        self._index = 0  # of the oldest value, which the next one replaces
        self.num = 0
        self.quiet_until = 0
        self.bound = inf
        self.median = self.low = self.high = self.first = 0.0

    def update(self, value: float) -> Spike | None:
        """Add the next value, which must be finite. Returns a spike if one starts with this value."""
        self.num += 1
        spike = self._check(value) if value > self.bound else None
        values, index = self._values, self._index
        if index == len(values):
            values.append(value)
        else:
            values[index] = value
        self._index = index = (index + 1) % WINDOW
        if not index % UPDATE_EVERY:
            self._update_bound()
        return spike

    def _check(self, value: float) -> Spike | None:
        self._update_bound()  # it may be a few values old
        if value <= self.bound:
            return None
        is_start = self.num > self.quiet_until
        self.quiet_until = self.num + CALM
        return Spike(value, self.median, self.low, self.high, self.bound) if is_start else None

    def _update_bound(self) -> None:
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


class LossBound(RollingBound):
    """Bound of a loss, which may be negative or near zero."""

    __slots__ = ()

    def _bound(self) -> float:
        median = self.median
        return median + max(LOSS_SPREADS * (self.high - median), LOSS_RISE * abs(median), LOSS_LOST * (self.first - median))


class SpreadBound(RollingBound):
    """Bound of logarithms or of shares. A value is a spike only if it is more than `rise` above the median."""

    __slots__ = ("_rise",)

    def __init__(self, rise: float) -> None:
        super().__init__()
        self._rise = rise

    def _bound(self) -> float:
        return self.median + max(SPREADS * (self.high - self.median), self._rise)


class LogNormBound(SpreadBound):
    """Bound of the logarithm of a gradient norm."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(NORM_RISE)

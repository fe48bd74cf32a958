"""The noise of a comparison, estimated from the two profiles themselves.

Other programs can only make a step longer, so the fastest of the measured times are compared. Most parts of a model do not change between
two profiles: the median of their ratios shows how much faster or slower the machine was as a whole, and the median of what remains shows
by how much a single part varies. If the usual step takes much longer than the fastest one, caches are cold in the fastest ones too.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from sonde.profiler.profile_report import TimeSpread

CHANGED = 1.2  # ratio: on a machine with other load, two profiles of one program differ by up to this
SMALLEST = 0.02  # share of the step: allocations and the cost of the timers differ by this much from one process or moment to the next
MIN_PARTS = 3  # with fewer, no noise can be told from a change
MAX_SHIFT = 1.2  # of the whole machine, by shared caches and the clock rate: a larger ratio of all parts is a change of the program
MAX_RATIO = 1.7  # of all noise, unless threads were disturbed: a layer that takes twice as long is found on a busy machine too
DEVIATION = 1.5  # times the median deviation of the parts' ratios from their median, if the steps were disturbed
SCATTER = 3.0  # times the median difference of the parts
MAX_SCATTER = 0.05  # share of the step: if half of the parts changed, their difference is no noise


class Noise(NamedTuple):
    """A change is reported if it is larger than both."""

    ratio: float = CHANGED
    ms: float = 0.0

    def separates(self, fast: TimeSpread, slow: TimeSpread) -> bool:
        """Whether `slow` takes longer than `fast` by more than the noise, and both its median and its fastest time say so."""
        if not slow.median_ms > self.ratio * fast.median_ms:
            return False
        if fast.fastest_ms >= 0 and slow.fastest_ms > 0:
            ratio = max(self.ratio, min(self.ratio * _own_variation(fast, slow), MAX_RATIO))
            return slow.fastest_ms > ratio * fast.fastest_ms and slow.fastest_ms - fast.fastest_ms >= self.ms
        return slow.low_ms > fast.high_ms  # a file of an earlier version


def _own_variation(*spreads: TimeSpread) -> float:
    """The geometric mean of lower quartile over fastest time: how much these times vary where they are least disturbed."""
    return math.prod(each.low_ms / each.fastest_ms for each in spreads if each.fastest_ms > 0) ** (1 / len(spreads))


def fastest(spread: TimeSpread) -> float:
    """The fastest time; the median where it is not known."""
    return spread.fastest_ms if math.isfinite(spread.fastest_ms) else spread.median_ms


def estimate_noise(parts: Sequence[tuple[TimeSpread, TimeSpread]], steps: Sequence[TimeSpread], *, is_disturbed: bool) -> Noise:
    """The noise of a comparison with these parts, which do not overlap, before and after. `steps` are the whole steps; `is_disturbed` if
    several threads compute and other programs interrupted most steps. Threads wait for each other, so even the fastest times are then too
    long, by any factor: a layer must differ from the other layers."""
    known = [step for step in steps if step.is_known]
    step_ms = max(map(fastest, known), default=math.nan)
    disturbance = max((step.median_ms / fastest(step) for step in known if fastest(step) > 0), default=1.0)
    values = [(before.fastest_ms, after.fastest_ms) for before, after in parts if before.fastest_ms > 0 and after.fastest_ms > 0]
    smallest_ms = SMALLEST * step_ms if math.isfinite(step_ms) else 0.0
    if len(values) < MIN_PARTS:
        return Noise(math.inf if is_disturbed else min(CHANGED * disturbance, MAX_RATIO), smallest_ms)
    large = [math.log(after / before) for before, after in values if max(before, after) >= smallest_ms]
    shift = median(large) if len(large) >= MIN_PARTS else 0.0
    scatter_ms = median(abs(after - math.exp(shift) * before) for before, after in values)
    most_ms = MAX_SCATTER * step_ms if math.isfinite(step_ms) else 0.0
    ratio = min(CHANGED * min(math.exp(abs(shift)), MAX_SHIFT) * disturbance, MAX_RATIO)
    if is_disturbed:
        if len(large) < MIN_PARTS:
            return Noise(math.inf, smallest_ms)
        deviation = median(abs(each - shift) for each in large)
        ratio = max(ratio, CHANGED * math.exp(abs(shift) + DEVIATION * deviation))
    return Noise(ratio, smallest_ms + min(SCATTER * scatter_ms, most_ms))

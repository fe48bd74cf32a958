"""What the trials say: how much a change gains, and whether the training stays the same. Pure arithmetic.

The machine has its moods, and they last longer than a trial. So the unchanged script is measured again and again between the changed ones,
and a change is compared with those right before and after it. Noise is what the unchanged script differs by from one time to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from sonde.tuning.messages import Trial

LEAST_GAIN = 0.03  # a change that saves less is not worth a line of code
SURE = 4.0  # times the noise, over the root of the number of runs: well over two standard deviations, for many changes are tried
TOLERANCE = 0.02  # of the loss: bfloat16 alone rounds at 0.4 %, and a few steps amplify that


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as fast: the median of all comparisons, and the least and the most of them."""

    factor: float
    low: float
    high: float
    num_runs: int
    verdict: str  # "faster", "slower", "noise"


@dataclass(frozen=True, slots=True)
class LossCheck:
    kind: str  # "same" (bit for bit), "close", "departs", "unknown" (nothing to compare with)
    difference: float = 0.0  # the largest, as a share of the loss
    step: int = -1  # the first that is further away than the tolerance
    num_steps: int = 0


def noise_of(baselines: Sequence[float]) -> float:
    """By which share the unchanged script differs from itself, typically, from one time to the next."""
    steps = [abs(later / earlier - 1) for earlier, later in pairwise(baselines)]
    return median(steps) if steps else 0.0


def ratios(sequence: Sequence[tuple[str, float]], name: str, baseline: str = "") -> list[float]:
    """The speeds of `name`, each divided by those of the baselines around it. `sequence` is in the order of measuring."""
    found = []
    for index, (who, speed) in enumerate(sequence):
        if who != name:
            continue
        before = next((other for key, other in reversed(sequence[:index]) if key == baseline), None)
        after = next((other for key, other in sequence[index + 1 :] if key == baseline), None)
        beside = [other for other in (before, after) if other is not None]
        if beside:
            found.append(speed / (sum(beside) / len(beside)))
    return found


def gain_of(ratio: Sequence[float], noise: float) -> Gain:
    """Faster is what was faster every time, and by more than the noise. With many changes tried, one looks good by chance."""
    factor, low, high = median(ratio), min(ratio), max(ratio)
    margin = max(LEAST_GAIN, SURE * noise / math.sqrt(len(ratio)))
    if low > 1 and factor > 1 + margin:
        verdict = "faster"
    elif high < 1 and factor < 1 / (1 + margin):
        verdict = "slower"
    else:
        verdict = "noise"
    return Gain(factor, low, high, len(ratio), verdict)


def speed_of(trial: Trial, *, by_samples: bool) -> float:
    return trial.samples_per_s if by_samples else trial.steps_per_s


def compare_losses(baseline: Sequence[float], losses: Sequence[float], own_difference: float = 0.0) -> LossCheck:
    """Are these the losses of the same training? `own_difference` is what the unchanged script differs by from itself."""
    num = min(len(baseline), len(losses))
    pairs = [(one, other) for one, other in zip(baseline, losses) if not (math.isnan(one) and math.isnan(other))]
    if not pairs or own_difference > TOLERANCE:
        return LossCheck("unknown", num_steps=num)
    if all(one == other for one, other in pairs):
        return LossCheck("same", num_steps=num)
    finite = [abs(one) for one, _ in pairs if math.isfinite(one)]
    scale = (median(finite) if finite else 0.0) or 1.0  # a typical loss: near zero a share of the loss itself says nothing
    apart = [_apart(one, other, scale) for one, other in zip(baseline, losses)]
    worst = max(apart)
    if worst <= TOLERANCE:
        return LossCheck("close", worst, num_steps=num)
    return LossCheck("departs", worst, next(step for step, share in enumerate(apart) if share > TOLERANCE), num)


def _apart(one: float, other: float, scale: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    share = abs(one - other) / scale
    return share if math.isfinite(share) else math.inf

"""Computes the gain of a change from its trials, and whether the losses stay the same.

The speed of a machine drifts over times longer than a trial. So the unchanged script is measured repeatedly between the changed ones, and a
trial is compared with the baselines right before and after it. Noise is the typical difference between two consecutive baselines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

MIN_GAIN = 0.03  # a smaller gain is not worth a line of code
NOISE_FACTOR = 4.0  # times the noise over the root of the number of runs: more than two standard deviations, because many changes are tried
TOLERANCE = 0.02  # of the loss: bfloat16 alone rounds at 0.4 %, and a few steps amplify that


@dataclass(frozen=True, slots=True)
class Gain:
    """Speed relative to the unchanged script: median, minimum and maximum of all comparisons."""

    factor: float
    low: float
    high: float
    num_runs: int
    verdict: str  # "faster", "slower", "noise"


@dataclass(frozen=True, slots=True)
class LossCheck:
    """Comparison of the losses of a trial with those of the unchanged script."""

    kind: str  # "same" (bit for bit), "close", "departs", "unknown" (nothing to compare with)
    difference: float = 0.0  # the largest, as a share of a typical loss
    step: int = -1  # the first step beyond the tolerance
    num_steps: int = 0


def noise_of(baselines: Sequence[float]) -> float:
    """The median relative difference between two consecutive runs of the unchanged script."""
    differences = [abs(later / earlier - 1) for earlier, later in pairwise(baselines)]
    return median(differences) if differences else 0.0


def ratios(sequence: Sequence[tuple[str, float]], name: str, baseline: str = "") -> list[float]:
    """The speeds of `name`, each divided by the mean of the baselines before and after it. `sequence` is in the order of measuring."""
    found = []
    for index, (trial_name, speed) in enumerate(sequence):
        before = [other for key, other in sequence[:index] if key == baseline][-1:]
        after = [other for key, other in sequence[index + 1 :] if key == baseline][:1]
        if trial_name == name and (before or after):
            found.append(speed / mean(before + after))
    return found


def gain_of(ratio: Sequence[float], noise: float) -> Gain:
    """The verdict is "faster" only if every comparison was faster and the median exceeds the noise: one of many looks good by chance."""
    factor, low, high = median(ratio), min(ratio), max(ratio)
    margin = max(MIN_GAIN, NOISE_FACTOR * noise / math.sqrt(len(ratio)))
    is_faster, is_slower = low > 1 and factor > 1 + margin, high < 1 and factor < 1 / (1 + margin)
    return Gain(factor, low, high, len(ratio), "faster" if is_faster else "slower" if is_slower else "noise")


def compare_losses(baseline: Sequence[float], losses: Sequence[float], own_difference: float = 0.0) -> LossCheck:
    """Compares losses step by step. `own_difference` is the difference between two runs of the unchanged script."""
    num = min(len(baseline), len(losses))
    pairs = [(one, other) for one, other in zip(baseline, losses) if not (math.isnan(one) and math.isnan(other))]
    if not pairs or own_difference > TOLERANCE:
        return LossCheck("unknown", num_steps=num)
    if all(one == other for one, other in pairs):
        return LossCheck("same", num_steps=num)
    finite = [abs(one) for one, _ in pairs if math.isfinite(one)]
    scale = (median(finite) if finite else 0.0) or 1.0  # a typical loss: a share of a loss near zero is meaningless
    differences = [_difference(one, other, scale) for one, other in zip(baseline, losses)]
    worst = max(differences)
    if worst <= TOLERANCE:
        return LossCheck("close", worst, num_steps=num)
    return LossCheck("departs", worst, next(step for step, share in enumerate(differences) if share > TOLERANCE), num)


def _difference(one: float, other: float, scale: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    share = abs(one - other) / scale
    return share if math.isfinite(share) else math.inf

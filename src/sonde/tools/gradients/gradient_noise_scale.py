"""The simple gradient noise scale: the batch size at which the noise of a gradient is as large as the gradient.

McCandlish et al., "An Empirical Model of Large-Batch Training" (2018): the squared norm of a gradient over B samples is
|G|² + S / B on average, with the true gradient G and the variance S over samples. Norms at two batch sizes give both, and S / |G|².
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from sonde.formatting import number

ENOUGH_PAIRS = 10  # measurements: the difference of two noisy squares is itself noisy
SPIKE = 10.0  # times the median norm
NEEDS = "it needs steps of several micro-batches (gradient accumulation), or norms at two batch sizes: record_norm_at(batch_size, norm)"


class NormPair(NamedTuple):
    """Squared norms of the mean gradient over a small and a large batch."""

    small_batch: float
    small_square: float
    big_batch: float
    big_square: float


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The estimated noise scale, with the reason."""

    value: float | None  # None if it could not be estimated
    unit: str  # "samples" or "micro-batches"
    reason: str

    def __str__(self) -> str:
        return f"could not tell: {self.reason}" if self.value is None else f"about {number(self.value)} {self.unit}: {self.reason}"


def estimate_noise_scale(pairs: Iterable[NormPair], unit: str) -> NoiseScale:
    """Estimates the noise scale. Noise and signal are averaged before the division: single measurements may be negative."""
    finite = [pair for pair in pairs if math.isfinite(pair.small_square) and math.isfinite(pair.big_square)]
    if not finite:
        return NoiseScale(None, unit, NEEDS)
    # A spike would dominate an average of squares.
    small_limit, big_limit = (SPIKE * SPIKE * median(pair[at] for pair in finite) for at in (1, 3))
    known = [pair for pair in finite if pair.small_square <= small_limit and pair.big_square <= big_limit]
    if len(known) < ENOUGH_PAIRS:
        return NoiseScale(None, unit, f"{len(known)} measurements, {ENOUGH_PAIRS} are needed")
    signal = math.fsum((b * big - s * small) / (b - s) for s, small, b, big in known) / len(known)
    noise = math.fsum((small - big) / (1 / s - 1 / b) for s, small, b, big in known) / len(known)
    if signal <= 0:
        return NoiseScale(None, unit, f"no signal above the noise in {len(known)} measurements: far larger than your batches")
    if noise <= 0:
        return NoiseScale(None, unit, f"no measurable noise in {len(known)} measurements: far smaller than your batches")
    reason = f"from {len(known)} measurements; a larger batch than that saves few steps, a smaller one wastes little"
    return NoiseScale(noise / signal, unit, reason)

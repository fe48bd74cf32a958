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
NEEDS = (
    "it needs steps of several micro-batches (gradient accumulation), or norms at two batch sizes: record_norm_at(batch_size, norm)"
)


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
    known = _without_spikes([pair for pair in pairs if math.isfinite(pair.small_square) and math.isfinite(pair.big_square)])
    if not known:
        return NoiseScale(None, unit, NEEDS)
    if len(known) < ENOUGH_PAIRS:
        return NoiseScale(None, unit, f"{len(known)} measurements, {ENOUGH_PAIRS} are needed")
    signal = math.fsum(_signal(pair) for pair in known) / len(known)
    noise = math.fsum(_noise(pair) for pair in known) / len(known)
    if signal <= 0:
        return NoiseScale(None, unit, f"no signal above the noise in {len(known)} measurements: far larger than your batches")
    if noise <= 0:
        return NoiseScale(None, unit, f"no measurable noise in {len(known)} measurements: far smaller than your batches")
    text = f"from {len(known)} measurements; a larger batch than that saves few steps, a smaller one wastes little"
    return NoiseScale(noise / signal, unit, text)


def _without_spikes(pairs: list[NormPair]) -> list[NormPair]:
    """The pairs without spikes, which would dominate an average of squares."""
    if not pairs:
        return pairs
    limits = [SPIKE * SPIKE * median(pair[at] for pair in pairs) for at in (1, 3)]
    return [pair for pair in pairs if pair.small_square <= limits[0] and pair.big_square <= limits[1]]


def _signal(pair: NormPair) -> float:
    return (pair.big_batch * pair.big_square - pair.small_batch * pair.small_square) / (pair.big_batch - pair.small_batch)


def _noise(pair: NormPair) -> float:
    return (pair.small_square - pair.big_square) / (1 / pair.small_batch - 1 / pair.big_batch)

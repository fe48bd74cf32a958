"""Steps that stand out: losses that are no number or that leap, accuracy and throughput that drop, memory that grows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sonde.diagnostics.data import ModelPerformanceMetrics
from sonde.memory_trend import MemoryTrend
from sonde.rules.words import number
from sonde.spike_detection import LossBound, RollingBound

MOST = 100  # that are kept of each kind; all are counted
SLOWER = math.log(1.5)  # a throughput below two thirds of the usual, and far outside of its own scatter
SPREADS = 4.0  # in units of (high values of the window - median), as for gradient norms
DROP = 0.2  # of accuracy, absolute: batches of 32 differ by less
LEAST_GROWTH = 0.1  # of the memory at first: less growth is caches and chance


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Something out of the ordinary at one step."""

    kind: str  # "loss not finite" | "loss spike" | "accuracy drop" | "throughput drop" | "memory growth"
    step: int
    value: float
    usual: float  # NaN where there is none
    text: str


class _Slow(RollingBound):
    """Of the logarithm of the time per sample."""

    __slots__ = ()

    def _bound(self) -> float:
        return self.median + max(SPREADS * (self.high - self.median), SLOWER)


class _Wrong(RollingBound):
    """Of the share of wrong answers."""

    __slots__ = ()

    def _bound(self) -> float:
        return self.median + max(SPREADS * (self.high - self.median), DROP)


@dataclass(slots=True)
class Anomalies:
    """A fold."""

    kept: list[Anomaly] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    losses: LossBound = field(default_factory=LossBound)
    times: _Slow = field(default_factory=_Slow)
    wrong: _Wrong = field(default_factory=_Wrong)
    memory: MemoryTrend = field(default_factory=MemoryTrend)
    first_memory: float = math.nan

    def see(self, metrics: ModelPerformanceMetrics) -> None:
        step, loss, rate, right = metrics.training_step, metrics.loss, metrics.throughput_samples_per_sec, metrics.accuracy
        if not math.isfinite(loss):
            self._add("loss not finite", step, loss, self.losses.median if self.losses.num else math.nan, f"the loss is {number(loss)}")
        elif (leap := self.losses.update(loss)) is not None:
            self._add("loss spike", step, loss, leap.usual, f"the loss leapt to {number(loss)} from about {number(leap.usual)}")
        if rate is not None and 0 < rate < math.inf and (slow := self.times.update(-math.log(rate))) is not None:
            usual = math.exp(-slow.usual)
            said = f"{number(rate)} samples per second, usually about {number(usual)}"
            self._add("throughput drop", step, rate, usual, said)
        if right is not None and math.isfinite(right) and right <= 1 and (drop := self.wrong.update(1 - right)) is not None:
            said = f"accuracy fell to {number(right)} from about {number(1 - drop.usual)}"
            self._add("accuracy drop", step, right, 1 - drop.usual, said)
        if metrics.memory_usage_mb is not None and math.isfinite(metrics.memory_usage_mb):
            self.first_memory = metrics.memory_usage_mb if self.first_memory != self.first_memory else self.first_memory
            self.memory.update(step, metrics.memory_usage_mb)

    def _add(self, kind: str, step: int, value: float, usual: float, text: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.counts[kind] <= MOST:
            self.kept.append(Anomaly(kind, step, value, usual, text))

    def count(self, kind: str) -> int:
        return self.counts.get(kind, 0)

    def found(self) -> tuple[Anomaly, ...]:
        """All that were kept, by step, with the growth of memory as it is known now."""
        trend = self.memory.trend(LEAST_GROWTH * self.first_memory) if self.first_memory > 0 else None
        if trend is None:
            return tuple(self.kept)
        said = f"memory grew from {number(trend.first)} to {number(trend.last)} MiB, {number(trend.per_step)} MiB per step"
        grown = Anomaly("memory growth", trend.first_step, trend.last, trend.first, said)
        return tuple(sorted([*self.kept, grown], key=lambda one: one.step))

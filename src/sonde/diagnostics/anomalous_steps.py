"""Steps with anomalies: losses that are not finite or that spike, accuracy and throughput that drop, memory that grows."""

import math
from dataclasses import dataclass, field

from sonde.formatting import number
from sonde.memory_trend import MemoryTrend
from sonde.spike_detection import LossBound, SpreadBound

MAX_PER_KIND = 100  # that are stored; all are counted
SLOWER = math.log(1.5)  # a throughput below two thirds of the usual, and far outside of its own scatter
DROP = 0.2  # of accuracy, absolute: batches of 32 differ by less
LEAST_GROWTH = 0.1  # of the memory at first: less growth is caches and chance


@dataclass(frozen=True, slots=True)
class Anomaly:
    """An unusual value in one step."""

    kind: str  # "loss not finite" | "loss spike" | "accuracy drop" | "throughput drop" | "memory growth"
    step: int
    value: float
    usual: float  # NaN if there is none
    text: str


@dataclass(slots=True)
class AnomalyDetector:
    """Finds anomalies step by step, in bounded memory. Quantities that are not known are NaN."""

    found: list[Anomaly] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    _loss: LossBound = field(default_factory=LossBound)
    _time: SpreadBound = field(default_factory=lambda: SpreadBound(SLOWER))  # logarithm of the time per sample
    _error_rate: SpreadBound = field(default_factory=lambda: SpreadBound(DROP))
    _memory: MemoryTrend = field(default_factory=MemoryTrend)
    _first_memory_mb: float = math.nan

    def update(self, step: int, loss: float, throughput: float, accuracy: float, memory_mb: float) -> None:
        if not math.isfinite(loss):
            self._add("loss not finite", step, loss, self._loss.median if self._loss.num else math.nan, f"the loss is {number(loss)}")
        elif (spike := self._loss.update(loss)) is not None:
            self._add("loss spike", step, loss, spike.usual, f"the loss jumped to {number(loss)} from about {number(spike.usual)}")
        if 0 < throughput < math.inf and (spike := self._time.update(-math.log(throughput))) is not None:
            usual = math.exp(-spike.usual)
            self._add("throughput drop", step, throughput, usual, f"{number(throughput)} samples per second, usually about {number(usual)}")
        if -math.inf < accuracy <= 1 and (spike := self._error_rate.update(1 - accuracy)) is not None:
            text = f"accuracy fell to {number(accuracy)} from about {number(1 - spike.usual)}"
            self._add("accuracy drop", step, accuracy, 1 - spike.usual, text)
        if math.isfinite(memory_mb):
            self._first_memory_mb = memory_mb if self._first_memory_mb != self._first_memory_mb else self._first_memory_mb
            self._memory.update(step, memory_mb)

    def _add(self, kind: str, step: int, value: float, usual: float, text: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.counts[kind] <= MAX_PER_KIND:
            self.found.append(Anomaly(kind, step, value, usual, text))

    @property
    def anomalies(self) -> tuple[Anomaly, ...]:
        """By step, with the growth of memory so far."""
        growth = self._memory.trend(LEAST_GROWTH * self._first_memory_mb) if self._first_memory_mb > 0 else None
        if growth is None:
            return tuple(self.found)
        text = f"memory grew from {number(growth.first)} to {number(growth.last)} MiB, {number(growth.per_step)} MiB per step"
        grown = Anomaly("memory growth", growth.first_step, growth.last, growth.first, text)
        return tuple(sorted([*self.found, grown], key=lambda each: each.step))

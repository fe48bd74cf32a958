"""The numbers of a training that diagnostics are computed from, one column per quantity, and the recorder for those that a user passes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from math import isfinite

import numpy as np
import numpy.typing as npt

from sonde.diagnostics.anomalous_steps import AnomalyDetector
from sonde.diagnostics.user_supplied_metrics import ModelPerformanceMetrics, or_nan
from sonde.run_view.loss_trend import FIRST, LossColumns, LossTrend

MAX_STEPS = 1 << 16  # that a recorder stores; beyond twice as many, every second one is dropped
MAX_POINTS = 4096  # of a curve in a picture

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over steps."""

    steps: Floats
    values: Floats

    def finite(self) -> Curve:
        """In the order of the steps, without values that are not finite."""
        is_finite = np.isfinite(self.values)
        order = np.argsort(self.steps[is_finite], kind="stable")
        return Curve(self.steps[is_finite][order], self.values[is_finite][order])

    def points(self) -> tuple[tuple[int, float], ...]:
        """At most MAX_POINTS of them, for a picture."""
        chosen = thin(self.values, MAX_POINTS)
        return tuple(zip(self.steps[chosen].astype(np.int64).tolist(), self.values[chosen].tolist()))


@dataclass(frozen=True)
class TrainingColumns:
    """What is known about the steps of a training. A recorder drops steps of a long one; the totals cover all of them."""

    loss: Curve  # values that are not finite included
    trend: LossTrend
    validation: Curve
    throughput: Curve  # samples per second, of the steps for which it is known
    gpu_utilization: Floats
    anomalies: AnomalyDetector
    num_steps: int = 0  # with a loss
    num_samples: float = 0.0
    seconds: float = 0.0
    accuracy: Curve = field(default_factory=lambda: Curve(np.empty(0), np.empty(0)))
    is_recorded_by_hand: bool = False  # no rule has judged these numbers


class BoundedCurve:
    """A curve that grows, in bounded memory."""

    def __init__(self) -> None:
        self._steps, self._values = array("d"), array("d")
        self._stride = 1
        self._num_skipped = 0

    def add(self, step: int, value: float) -> None:
        self._num_skipped += 1
        if self._num_skipped < self._stride and isfinite(value):
            return
        self._num_skipped = 0
        self._steps.append(step)
        self._values.append(value)
        if len(self._values) >= 2 * MAX_STEPS:
            curve = self.curve()
            chosen = thin(curve.values, len(self._values) - 1)
            self._steps, self._values = array("d", curve.steps[chosen]), array("d", curve.values[chosen])
            self._stride *= 2

    def __len__(self) -> int:
        return len(self._values)

    def curve(self) -> Curve:
        return Curve(np.array(self._steps), np.array(self._values))


@dataclass(slots=True)
class MetricsRecorder:
    """Collects the metrics of steps, in bounded memory."""

    num_steps: int = 0
    num_samples: float = 0.0
    seconds: float = 0.0
    anomalies: AnomalyDetector = field(default_factory=AnomalyDetector)
    _loss: BoundedCurve = field(default_factory=BoundedCurve)
    _validation: BoundedCurve = field(default_factory=BoundedCurve)
    _throughput: BoundedCurve = field(default_factory=BoundedCurve)
    _gpu: BoundedCurve = field(default_factory=BoundedCurve)
    _accuracy: BoundedCurve = field(default_factory=BoundedCurve)
    _validation_accuracy: BoundedCurve = field(default_factory=BoundedCurve)

    def add(self, metrics: ModelPerformanceMetrics) -> None:
        step, num_samples, seconds = metrics.training_step, or_nan(metrics.batch_size), or_nan(metrics.step_time_ms) / 1e3
        rate = or_nan(metrics.throughput_samples_per_sec)
        if rate != rate and num_samples > 0 and seconds > 0:
            rate = num_samples / seconds
        elif seconds != seconds and rate > 0:
            seconds = num_samples / rate
        self.num_steps += 1
        self.num_samples += num_samples if num_samples == num_samples else 0.0
        self.seconds += seconds if seconds == seconds else 0.0
        self.anomalies.update(step, metrics.loss, rate, or_nan(metrics.accuracy), or_nan(metrics.memory_usage_mb))
        self._loss.add(step, metrics.loss)
        for curve, value in (
            (self._validation, metrics.validation_loss), (self._throughput, rate), (self._gpu, metrics.gpu_utilization),
            (self._accuracy, metrics.accuracy), (self._validation_accuracy, metrics.validation_accuracy),
        ):  # fmt: skip
            if value is not None and value == value:
                curve.add(step, value)

    def columns(self) -> TrainingColumns:
        loss, validation = self._loss.curve(), self._validation.curve()
        throughput, gpu = self._throughput.curve().finite(), self._gpu.curve().finite().values
        totals = self.num_steps, self.num_samples, self.seconds
        accuracy = self._accuracy.curve() if len(self._accuracy) else self._validation_accuracy.curve()
        return TrainingColumns(
            loss, _trend(loss), validation, throughput, gpu, self.anomalies, *totals, accuracy=accuracy, is_recorded_by_hand=True
        )


def thin(values: Floats, most: int) -> Ints:
    """Indices of at most `most` values. Every second one is dropped, as often as needed; the first ones, and values that are not finite,
    are dropped last."""
    chosen = np.arange(len(values))
    while len(chosen) > most:
        is_kept = ~np.isfinite(values[chosen])
        is_kept[:FIRST] = is_kept[1::2] = True
        chosen = chosen[is_kept] if not is_kept.all() else chosen[-most:]
    return chosen


def _trend(loss: Curve) -> LossTrend:
    num = len(loss.values)
    losses = LossColumns(loss.values, np.ones(num, bool), ~np.isfinite(loss.values), nonfinite_after_last=False)
    return LossTrend.from_columns(
        loss.steps.astype(np.int64), losses, skipped=np.zeros(num, bool), has_several=False, class_counts=frozenset(), after_last=-1
    )

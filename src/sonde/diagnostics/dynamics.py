"""How a training goes: does it learn, is it steady, has it settled, does it learn by heart, and what does learning cost?

A fold over steps with bounded state. Whether a loss falls at all is asked of the same fold as in the rules, so that the two never disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from sonde.diagnostics.anomalies import Anomalies, Anomaly
from sonde.diagnostics.convergence import Convergence, convergence
from sonde.diagnostics.data import ModelPerformanceMetrics, known
from sonde.diagnostics.series import Floats, Series, pieces, spread
from sonde.events import Event, Step
from sonde.rules.learning import ENOUGH, Learning

SETTLED = 0.3  # share of the steps without a gain that makes a plateau; less is the noise of the end
GAIN = 0.02  # of all that was gained so far: less than that is none
CERTAIN = 2.33  # standard deviations: chance is that far off once in a hundred
BEYOND_DOUBT = 4.0
FALLEN = 0.2  # of the level: a loss that has risen before must fall by that much to be called learning again
NOISES = 2.0  # standard deviations of a piece: what falls by less may not have fallen
FEWEST_VALIDATIONS = 4  # before any of them can be called the best
WORSE = 0.05  # of what validation gained: a worse end than the best is noise below that
CALMED = 3.0  # times: by less than that, the noise of a loss has not grown

LEARNING = ("improving", "settled", "not learning", "diverging", "not finite", "could not tell")


@dataclass(frozen=True, slots=True)
class Stability:
    """How steadily the loss goes. `noise_share` is the scatter around its own course, beside its level."""

    noise_share: float | None
    noise_growth: float | None  # of the last third over the first: above 1 it gets rougher
    num_spikes: int
    num_nonfinite: int  # but for those that a GradScaler has dealt with

    @property
    def is_rougher(self) -> bool:
        return self.noise_growth is not None and self.noise_growth > CALMED


@dataclass(frozen=True, slots=True)
class Plateau:
    """A stretch to the end without a gain beyond noise."""

    since_step: int
    num_steps: int
    level: float


@dataclass(frozen=True, slots=True)
class Overfitting:
    """Validation against training. `is_overfitting` is None where it could not be told."""

    is_overfitting: bool | None
    reason: str  # why it could not be told; else what it rests on
    best_step: int = -1
    best: float = math.nan
    last: float = math.nan
    lost_share: float = 0.0  # of what validation had gained, what was lost since its best
    gap: float | None = None  # validation above training, at the end


@dataclass(frozen=True, slots=True)
class LearningEfficiency:
    """What was learnt, and for how much. Everything is None where what it is divided by is not known."""

    removed_share: float | None  # of the first level of the loss, what is gone
    per_thousand_samples: float | None
    per_minute: float | None
    num_samples: float | None
    samples_per_second: float | None  # median


@dataclass(frozen=True, slots=True)
class TrainingDynamics:
    """All that the steps say."""

    num_steps: int
    first_step: int
    last_step: int
    learning: str  # one of LEARNING
    why: str  # the evidence for it, in words
    first_loss: float
    last_loss: float  # medians of the first and of the last few
    convergence: Convergence | None
    stability: Stability
    plateau: Plateau | None
    overfitting: Overfitting
    efficiency: LearningEfficiency
    anomalies: tuple[Anomaly, ...]


@dataclass(slots=True)
class Dynamics:
    """The fold."""

    learning: Learning = field(default_factory=Learning)
    loss: Series = field(default_factory=Series)
    validation: Series = field(default_factory=Series)
    throughput: Series = field(default_factory=Series)
    accuracy: Series = field(default_factory=Series)
    gpu: Series = field(default_factory=Series)
    anomalies: Anomalies = field(default_factory=Anomalies)
    num_samples: float = 0.0
    seconds: float = 0.0
    first_step: int = -1
    last_step: int = -1

    def see(self, metrics: ModelPerformanceMetrics, step: Step | None = None) -> None:
        """`step` is what a run holds of it, where there is a run; else it is made from the metrics."""
        number, loss = metrics.training_step, metrics.loss
        self.learning.see(step if step is not None else _as_step(metrics))
        self.first_step = number if self.first_step < 0 else min(number, self.first_step)
        self.last_step = max(number, self.last_step)
        self.loss.see(number, loss)
        self.anomalies.see(metrics)
        for series, value in (
            (self.validation, metrics.validation_loss), (self.throughput, metrics.throughput_samples_per_sec),
            (self.accuracy, metrics.accuracy), (self.gpu, metrics.gpu_utilization),
        ):  # fmt: skip
            if value is not None:
                series.see(number, value)
        batch, rate, took = known(metrics.batch_size), known(metrics.throughput_samples_per_sec), known(metrics.step_time_ms) / 1e3
        if rate != rate and batch > 0 and took > 0:
            self.throughput.see(number, batch / took)
        self.num_samples += batch if batch == batch else 0.0
        seconds = took if took == took else batch / rate if rate > 0 else math.nan
        self.seconds += seconds if seconds == seconds else 0.0

    def validated(self, step: int, loss: float) -> None:
        """A validation loss that came by itself."""
        self.validation.see(step, loss)

    def result(self, ahead: int | None = None) -> TrainingDynamics:
        steps, losses = self.loss.finite()
        state, why = self._state()
        found = convergence(steps, losses, ahead)
        if found is not None and self.learning.gone and self.learning.num_nonfinite:
            found = replace(found, forecast=None, reason="the loss is not finite any more")
        flat = _plateau(steps, losses) if state in ("improving", "not learning") else None
        if flat is not None and state == "improving":
            state, why = "settled", f"no gain since step {flat.since_step}, after the loss had fallen; {why}"
        return TrainingDynamics(
            self.loss.num, self.first_step, self.last_step, state, why, self.learning.first_level, self.learning.recent_level, found,
            self._stability(losses), flat, self._overfitting(), self._efficiency(), self.anomalies.found(),
        )  # fmt: skip

    def _state(self) -> tuple[str, str]:
        learning = self.learning
        if not learning.num_losses:
            return "could not tell", "no loss was recorded"
        first, last = f"{learning.first_level:.3g}", f"{learning.recent_level:.3g}"
        if learning.gone and learning.num_nonfinite:
            return "not finite", learning.failing
        if learning.risen:
            return "diverging", learning.failing
        if learning.several:
            return "could not tell", "several losses are trained in turn, and none of them need fall"
        if learning.fallen:
            return "improving", f"the loss fell from {first} to {last}"
        if learning.num_losses < ENOUGH:
            return "could not tell", f"{learning.num_losses} losses are too few: {ENOUGH} are needed"
        if (since := _falls_since(*self.loss.finite())) is not None:
            return "improving", since
        if learning.failing:
            return "not learning", learning.failing
        return "could not tell", f"the loss did not fall ({first}, then {last}), but such a loss need not"

    def _stability(self, losses: Floats) -> Stability:
        noise = growth = None
        if len(losses) >= ENOUGH:
            residual, level = _detrended(losses)
            noise = spread(residual / level)
            third = len(residual) // 3
            # Not beside the level: a loss that comes near zero has little level left, and nothing is wrong with that.
            early, late = spread(residual[:third]), spread(residual[-third:])
            growth = late / early if early > 0 and late > 0 else None
        return Stability(noise, growth, self.anomalies.count("loss spike"), self.learning.num_nonfinite)

    def _overfitting(self) -> Overfitting:
        steps, values = self.validation.finite()
        num = len(values)
        if num < FEWEST_VALIDATIONS:
            few = f"{num} validation losses: at least {FEWEST_VALIDATIONS} are needed"
            return Overfitting(None, few if num else "no validation loss was recorded")
        # The end is the median of the last few, and so is the best: one lucky validation is no measure.
        width = 3 if num >= 3 * FEWEST_VALIDATIONS else 1
        calm = np.array([np.median(values[max(0, i - width + 1) : i + 1]) for i in range(num)])
        best = int(np.argmin(calm))
        last, gained = float(calm[-1]), float(max(values[0] - calm[best], abs(calm[best]) * WORSE))
        lost = (last - float(calm[best])) / gained
        train_steps, train = self.loss.finite()
        since, before = train[train_steps >= steps[best]], train[train_steps <= steps[best]]
        gap = last - self.learning.recent_level if train.size else None
        noise = spread(np.diff(values)) / max(gained, 1e-30)
        falls = len(since) > 1 and len(before) > 1 and float(np.median(since[len(since) // 2 :])) <= float(np.median(before[-len(since) :]))
        after = num - 1 - best
        grew_worse = after >= 2 and lost > max(WORSE, NOISES * noise)
        told = (
            f"validation was best at step {int(steps[best])} ({calm[best]:.3g}) and is now {last:.3g}"
            + (", while the training loss kept falling" if grew_worse and falls else "")
        )  # fmt: skip
        return Overfitting(grew_worse and falls, told, int(steps[best]), float(calm[best]), last, max(0.0, lost), gap)

    def _efficiency(self) -> LearningEfficiency:
        first, last = self.learning.first_level, self.learning.recent_level
        removed = (first - last) / first if self.learning.first and first > 0 and math.isfinite(last) else None
        samples, seconds = self.num_samples or None, self.seconds or None
        _, rates = self.throughput.finite()
        return LearningEfficiency(
            removed,
            removed / samples * 1e3 if removed is not None and samples else None,
            removed / seconds * 60 if removed is not None and seconds else None,
            samples,
            float(np.median(rates)) if len(rates) else None,
        )


def _as_step(metrics: ModelPerformanceMetrics) -> Step:
    """What the rules' fold over losses reads. A loss that is NaN comes with an event, as in a run."""
    bad = Event("nonfinite", metrics.training_step, {"what": "loss", "where": "loss"})
    return Step(metrics.training_step, 0, {"loss": metrics.loss}, {}, () if math.isfinite(metrics.loss) else (bad,), {})


def _detrended(losses: Floats) -> tuple[Floats, Floats]:
    """Losses without their course, which is the median of the neighbours; and the size of that."""
    width = min(9, len(losses) // 3 * 2 + 1)
    around = np.lib.stride_tricks.sliding_window_view(np.pad(losses, width // 2, mode="edge"), width)
    course = np.median(around, axis=1)
    return losses - course, np.maximum(np.abs(course), 1e-12)


def _lower(early: Floats, late: Floats) -> float:
    """How many standard deviations the second is below the first, by ranks: heavy tails and the scale of a loss do not matter."""
    ranks = np.argsort(np.argsort(np.concatenate([early, late]), kind="stable"), kind="stable")
    num, other = len(early), len(late)
    above = float(ranks[:num].sum()) - num * (num - 1) / 2
    return (above - num * other / 2) / math.sqrt(num * other * (num + other + 1) / 12)


def _falls_since(steps: Floats, losses: Floats) -> str | None:
    """A loss that rose at first, as where a second task begins, and has fallen ever since: from which step, in words."""
    at, level = pieces(steps, losses, 32)
    top = float(at[int(np.argmax(level))])
    after = losses[steps >= top]
    if len(after) < max(ENOUGH, len(losses) * SETTLED):
        return None
    quarter = len(after) // 4
    early, late = after[:quarter], after[-quarter:]
    high, low = float(np.median(early)), float(np.median(late))
    if high - low < FALLEN * abs(high) or _lower(early, late) < BEYOND_DOUBT:
        return None
    return f"the loss fell from {high:.3g} to {low:.3g} since step {top:.0f}"


def _plateau(steps: Floats, losses: Floats) -> Plateau | None:
    """From which step on the loss gains nothing any more, by the medians of its pieces."""
    if len(losses) < ENOUGH:
        return None
    at, level = pieces(steps, losses, 32)
    tail = level[-max(3, len(level) // 8) :]
    end, gained = float(np.median(tail)), max(0.0, float(level[0] - np.median(tail)))
    noise = spread(level[len(level) // 2 :] - np.linspace(level[len(level) // 2], level[-1], len(level) - len(level) // 2))
    within = level <= end + max(NOISES * noise, GAIN * gained)
    above = np.flatnonzero(~within)
    start = int(above[-1]) + 1 if len(above) else 0
    if start >= len(at) or len(at) - start < SETTLED * len(at):
        return None
    since = int(at[start]) if start else int(steps[0])
    # The stretch itself must not fall any more: its later half is not below its earlier half, beyond chance and by more than nothing.
    early, late = np.array_split(losses[steps >= since], 2)
    if float(np.median(early) - np.median(late)) > GAIN * gained and _lower(early, late) > CERTAIN:
        return None
    return Plateau(since, int(steps[-1]) - since, end)

"""Training dynamics: whether a training learns (by `LossTrend`, as in the rules), is stable, has settled or overfits, and its cost."""

import math
from dataclasses import dataclass, replace

import numpy as np

from sonde.diagnostics.anomalous_steps import Anomaly
from sonde.diagnostics.convergence import Convergence, convergence, piecewise_medians, robust_std
from sonde.diagnostics.training_history import Curve, Floats, TrainingColumns
from sonde.run_view.loss_trend import ENOUGH, LossTrend

SETTLED = 0.3  # share of the steps without a gain that make a plateau; less may be noise at the end
GAIN = 0.02  # of all that was gained so far: less than that is none
CERTAIN = 2.33  # standard deviations: chance is that far off once in a hundred
BEYOND_DOUBT = 4.0
FALLEN = 0.2  # of the level: a loss that has risen before must fall by that much to be called learning again
NOISES = 2.0  # standard deviations of a piece: what falls by less may not have fallen
FEWEST_VALIDATIONS = 4  # before any of them can be called the best
WORSE = 0.05  # of what validation gained: a worse end than the best is noise below that
FALLEN_ACCURACY = 0.2  # of its best level, at the end: batches differ by less
FALLEN_THROUGHPUT = 0.5  # of its best level, at the end: longer sequences and a busy machine cost less
FEWEST_IN_FALL = 9  # values: three pieces of three


@dataclass(frozen=True, slots=True)
class Stability:
    """How stable the loss is. `noise_share` is the scatter around its trend, relative to its level."""

    noise_share: float | None
    noise_growth: float | None  # of the last third over the first: above 1 the noise grows
    num_spikes: int
    num_nonfinite: int  # without those whose update a GradScaler skipped


@dataclass(frozen=True, slots=True)
class Plateau:
    """Steps to the end without a gain beyond noise."""

    since_step: int
    num_steps: int
    level: float


@dataclass(frozen=True, slots=True)
class Overfitting:
    """Validation compared with training. `is_overfitting` is None if it is not known."""

    is_overfitting: bool | None
    reason: str  # the evidence, or why it is not known
    best_step: int = -1
    best: float = math.nan
    last: float = math.nan
    lost_share: float = 0.0  # of what validation had gained, what was lost since its best
    gap: float | None = None  # validation above training, at the end


@dataclass(frozen=True, slots=True)
class Fall:
    """A quantity that should not fall, and was higher for a while than it is at the end."""

    best_step: int  # the last one at its best level
    best: float
    last: float

    @property
    def lost_share(self) -> float:
        return 1 - self.last / self.best


@dataclass(frozen=True, slots=True)
class LearningEfficiency:
    """What was learned, and its cost. A quantity is None if what it is divided by is not known."""

    removed_share: float | None  # of the first level of the loss, what is gone
    per_thousand_samples: float | None
    per_minute: float | None
    num_samples: float | None
    samples_per_second: float | None  # median


@dataclass(frozen=True, slots=True)
class TrainingDynamics:
    """What the steps show."""

    num_steps: int
    first_step: int
    last_step: int
    learning: str  # "improving", "settled", "not learning", "diverging", "not finite" or "could not tell"
    why: str  # the evidence for it, in words
    first_loss: float
    last_loss: float  # medians of the first and of the last few
    convergence: Convergence | None
    stability: Stability
    plateau: Plateau | None
    overfitting: Overfitting
    efficiency: LearningEfficiency
    anomalies: tuple[Anomaly, ...]
    accuracy_fall: Fall | None = None
    throughput_fall: Fall | None = None  # only of numbers recorded by hand: rules judge those of a run


def training_dynamics(columns: TrainingColumns, ahead: int | None = None) -> TrainingDynamics:
    """`ahead`: number of steps after the last one for the forecast of the loss."""
    loss, trend = columns.loss.finite(), columns.trend
    learning, why = _learning(trend, loss)
    found = convergence(loss.steps, loss.values, ahead)
    if found is not None and trend.is_gone and trend.num_nonfinite:
        found = replace(found, forecast=None, reason="the loss is not finite any more")
    plateau = _plateau(loss) if learning in ("improving", "not learning") else None
    if plateau is not None and learning == "improving":
        learning, why = "settled", f"no gain since step {plateau.since_step}, after the loss had fallen; {why}"
    steps = columns.loss.steps
    return TrainingDynamics(
        num_steps=columns.num_steps, first_step=int(steps.min()) if columns.num_steps else -1,
        last_step=int(steps.max()) if columns.num_steps else -1, learning=learning, why=why, first_loss=trend.first_level,
        last_loss=trend.recent_level, convergence=found, stability=_stability(loss.values, columns), plateau=plateau,
        overfitting=_overfitting(columns.validation.finite(), loss, trend.recent_level), efficiency=_efficiency(columns),
        anomalies=columns.anomalies.anomalies, accuracy_fall=_fall(columns.accuracy.finite(), FALLEN_ACCURACY),
        throughput_fall=_fall(columns.throughput, FALLEN_THROUGHPUT) if columns.is_recorded_by_hand else None,
    )  # fmt: skip


def _learning(trend: LossTrend, loss: Curve) -> tuple[str, str]:
    if not trend.num_losses:
        return "could not tell", "no loss was recorded"
    first, last = f"{trend.first_level:.3g}", f"{trend.recent_level:.3g}"
    if trend.is_gone and trend.num_nonfinite:
        return "not finite", trend.failing
    if trend.has_risen:
        return "diverging", trend.failing
    if trend.has_several:
        return "could not tell", "several losses are trained in turn, and none of them needs to fall"
    if trend.has_fallen:
        return "improving", f"the loss fell from {first} to {last}"
    if trend.num_losses < ENOUGH:
        return "could not tell", f"only {trend.num_losses} of the {ENOUGH} losses that are needed"
    if (since := _falls_since(loss)) is not None:
        return "improving", since
    if trend.failing:
        return "not learning", trend.failing
    return "could not tell", f"the loss did not fall ({first}, then {last}), but such a loss need not"


def _stability(losses: Floats, columns: TrainingColumns) -> Stability:
    noise = growth = None
    if len(losses) >= ENOUGH:
        residual, level = _detrended(losses)
        noise = robust_std(residual / level)
        third = len(residual) // 3
        # Not relative to the level: a loss that comes near zero has little level left, and nothing is wrong with that.
        early, late = robust_std(residual[:third]), robust_std(residual[-third:])
        growth = late / early if early > 0 and late > 0 else None
    return Stability(noise, growth, columns.anomalies.counts.get("loss spike", 0), columns.trend.num_nonfinite)


def _overfitting(validation: Curve, loss: Curve, recent_loss: float) -> Overfitting:
    steps, values = validation.steps, validation.values
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
    since, before = loss.values[loss.steps >= steps[best]], loss.values[loss.steps <= steps[best]]
    noise = robust_std(np.diff(values)) / max(gained, 1e-30)
    falls = len(since) > 1 and len(before) > 1 and float(np.median(since[len(since) // 2 :])) <= float(np.median(before[-len(since) :]))
    grew_worse = num - 1 - best >= 2 and lost > max(WORSE, NOISES * noise)
    while_falling = ", while the training loss continued to fall" if grew_worse and falls else ""
    reason = f"validation was best at step {int(steps[best])} ({calm[best]:.3g}) and is now {last:.3g}{while_falling}"
    gap = last - recent_loss if loss.values.size else None
    return Overfitting(grew_worse and falls, reason, int(steps[best]), float(calm[best]), last, max(0.0, lost), gap)


def _efficiency(columns: TrainingColumns) -> LearningEfficiency:
    first, last = columns.trend.first_level, columns.trend.recent_level
    removed = (first - last) / first if first > 0 and math.isfinite(last) else None
    per_thousand = removed / columns.num_samples * 1e3 if removed is not None and columns.num_samples else None
    per_minute = removed / columns.seconds * 60 if removed is not None and columns.seconds else None
    samples_per_second = float(np.median(columns.throughput.values)) if len(columns.throughput.values) else None
    return LearningEfficiency(removed, per_thousand, per_minute, columns.num_samples or None, samples_per_second)


def _fall(curve: Curve, least_share: float) -> Fall | None:
    """The fall from the best level to the last one, beyond noise. Levels are medians of pieces of at least three values."""
    if len(curve.values) < FEWEST_IN_FALL:
        return None
    at, level = piecewise_medians(curve.steps, curve.values, min(32, len(curve.values) // 3))
    num_last = max(1, len(level) // 8)
    best, last = float(np.max(level)), float(np.max(level[-num_last:]))  # the end is down only if all of it is
    noise = robust_std(np.diff(level)) / math.sqrt(2)
    if best <= 0 or best - last < max(least_share * best, NOISES * noise):
        return None
    last_good = int(np.flatnonzero(level >= best - max(WORSE * best, NOISES * noise))[-1])
    return Fall(int(at[last_good]), best, last)


def _detrended(losses: Floats) -> tuple[Floats, Floats]:
    """Losses without their trend, which is the median of the neighbors; and the size of the trend."""
    width = min(9, len(losses) // 3 * 2 + 1)
    around = np.lib.stride_tricks.sliding_window_view(np.pad(losses, width // 2, mode="edge"), width)
    trend = np.median(around, axis=1)
    return losses - trend, np.maximum(np.abs(trend), 1e-12)


def _lower(early: Floats, late: Floats) -> float:
    """How many standard deviations the second is below the first, by ranks: heavy tails and the scale of a loss do not matter."""
    ranks = np.argsort(np.argsort(np.concatenate([early, late]), kind="stable"), kind="stable")
    num, other = len(early), len(late)
    above = float(ranks[:num].sum()) - num * (num - 1) / 2
    return (above - num * other / 2) / math.sqrt(num * other * (num + other + 1) / 12)


def _falls_since(loss: Curve) -> str | None:
    """A loss that rose at first, for instance because a second task began, and has fallen since: the step, in a sentence."""
    steps, losses = loss.steps, loss.values
    at, level = piecewise_medians(steps, losses, 32)
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


def _plateau(loss: Curve) -> Plateau | None:
    """From which step on the loss gains nothing any more, by the medians of its pieces."""
    steps, losses = loss.steps, loss.values
    if len(losses) < ENOUGH:
        return None
    at, level = piecewise_medians(steps, losses, 32)
    tail = level[-max(3, len(level) // 8) :]
    end, gained = float(np.median(tail)), max(0.0, float(level[0] - np.median(tail)))
    noise = robust_std(level[len(level) // 2 :] - np.linspace(level[len(level) // 2], level[-1], len(level) - len(level) // 2))
    within = level <= end + max(NOISES * noise, GAIN * gained)
    above = np.flatnonzero(~within)
    start = int(above[-1]) + 1 if len(above) else 0
    if start >= len(at) or len(at) - start < SETTLED * len(at):
        return None
    since = int(at[start]) if start else int(steps[0])
    # These steps themselves must not fall any more: its later half is not below its earlier half, beyond chance and by more than nothing.
    early, late = np.array_split(losses[steps >= since], 2)
    if float(np.median(early) - np.median(late)) > GAIN * gained and _lower(early, late) > CERTAIN:
        return None
    return Plateau(since, int(steps[-1]) - since, end)

"""Convergence of a loss: how fast it still falls, the level that it approaches, and a forecast with an interval. A loss is fitted by
`end + height * exp(-rate * t)` or `end + height * (t + 1)^-power`, whichever is nearer. The interval comes from the same forecast made
from earlier steps, compared with the losses that followed."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

ENOUGH = 20  # points: fewer show no shape
ENOUGH_TO_TRY = 24  # points before the forecast can be tried on the past
RATES = np.logspace(-1, 2.5, 43)  # per whole history: from nearly straight to over within its first hundredth
POWERS = np.linspace(0.1, 3.0, 30)
EARLIER = (0.5, 0.6, 0.7, 0.8)  # shares of the history from which the past is forecast
MARGIN = 1.2  # times the worst miss of the past: the worst of four is exceeded about once in five
CERTAIN = 1.645  # standard deviations around a level, for 90 %
AHEAD = 0.5  # of the history, if the caller does not say how far
MAX_PIECES = 64  # in which a curve is fitted: their medians are calm enough, and few enough to fit often

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shape:
    """A curve through the losses. Time runs from 0 at the first step to 1 at the last."""

    family: str  # "exponential" | "power"
    parameter: float
    end: float  # its limit
    height: float  # above that at time 0; below 0 if it rises
    noise: float  # of the pieces around it

    def at(self, time: float | Floats) -> Floats:
        return np.asarray(self.end + self.height * _basis(self.family, np.array([self.parameter]), np.atleast_1d(time))[0])


@dataclass(frozen=True, slots=True)
class Forecast:
    """The level of the loss at a later step; nine times in ten it should lie between `low` and `high`."""

    step: int
    loss: float
    low: float
    high: float
    num_tried: int  # earlier steps from which the same forecast was made
    worst_miss: float  # error among them


@dataclass(frozen=True, slots=True)
class Convergence:
    """How the loss changes now."""

    per_step: float  # change of the loss in one step, at the last one; below 0 if it falls
    half_life_steps: float | None  # until half of what can still be gained is gained; None if the limit is not known
    end: float | None  # the level that it approaches; None if it is not known yet
    forecast: Forecast | None
    reason: str = ""  # why there is no forecast


def convergence(steps: Floats, losses: Floats, ahead: int | None = None) -> Convergence | None:
    """`ahead`: number of steps after the last one for the forecast. None if there are too few points."""
    if len(losses) < ENOUGH or steps[-1] <= steps[0]:
        return None
    first, span = float(steps[0]), float(steps[-1] - steps[0])
    at, level = piecewise_medians(steps, losses)
    shape = fit((at - first) / span, level)
    now = shape.at(np.array([1.0 - 1e-3, 1.0]))
    per_step = float(now[1] - now[0]) / 1e-3 / span
    left = float(now[1]) - shape.end
    # A curve that is hardly bent so far does not show its limit.
    is_bent = shape.parameter >= (1.0 if shape.family == "exponential" else 0.5)
    end_known = is_bent and shape.height > 0 and left < 0.6 * shape.height
    rate = -per_step / left if left > 0 and per_step < 0 else 0.0
    horizon = span * AHEAD if ahead is None else float(ahead)
    forecast, reason = _forecast(steps, losses, shape, span, horizon)
    return Convergence(per_step, math.log(2) / rate if end_known and rate > 0 else None, shape.end if end_known else None, forecast, reason)


def fit(time: Floats, level: Floats) -> Shape:
    """The nearest curve by least squares; the later half of the points counts twice."""
    weights = np.where(time >= np.median(time), 2.0, 1.0)
    weights /= weights.sum()
    best, least = Shape("exponential", 1.0, float(np.median(level)), 0.0, robust_std(level)), math.inf
    for family, grid in (("exponential", RATES), ("power", POWERS)):
        basis = _basis(family, grid, time)
        mean_b, mean_y = basis @ weights, float(level @ weights)
        variance = ((basis - mean_b[:, None]) ** 2) @ weights
        covariance = ((basis - mean_b[:, None]) * (level - mean_y)) @ weights
        height = np.divide(covariance, variance, out=np.zeros_like(covariance), where=variance > 1e-30)
        end = mean_y - height * mean_b
        squares = ((end[:, None] + height[:, None] * basis - level) ** 2) @ weights
        i = int(np.argmin(squares))
        if squares[i] < least:
            least = float(squares[i])
            best = Shape(family, float(grid[i]), float(end[i]), float(height[i]), math.sqrt(least))
    return best


def _basis(family: str, grid: Floats, time: Floats) -> Floats:
    """One row for each value of the grid, 1 at time 0."""
    is_exponential = family == "exponential"
    return np.asarray(np.exp(-np.outer(grid, time)) if is_exponential else (1.0 + 64.0 * time[None, :]) ** -grid[:, None])


def _forecast(steps: Floats, losses: Floats, shape: Shape, span: float, horizon: float) -> tuple[Forecast | None, str]:
    if len(losses) < ENOUGH_TO_TRY:
        return None, f"{len(losses)} losses are too few to test a forecast on the past"
    if not 0 < horizon <= 10 * span:
        return None, f"{horizon:.0f} steps ahead: a forecast reaches at most ten times as far as the recorded steps"
    floor = 0.0 if losses.min() >= 0 else -math.inf  # a loss that was never below zero ends no lower
    value = max(float(shape.at(1 + horizon / span)[0]), floor)
    misses = [miss for share in EARLIER if (miss := _miss(steps, losses, share, horizon / span)) is not None]
    if len(misses) < 2:
        return None, "the past is too short to test such a forecast on"
    worst = max(misses)
    half = max(MARGIN * worst, CERTAIN * shape.noise)
    return Forecast(round(float(steps[-1]) + horizon), value, max(value - half, floor), value + half, len(misses), worst), ""


def _miss(steps: Floats, losses: Floats, share: float, lead: float) -> float | None:
    """The error of the same forecast from an earlier step: the distance to the losses that followed."""
    num = int(len(losses) * share)
    if num < ENOUGH // 2:
        return None
    at, level = piecewise_medians(steps[:num], losses[:num])
    begin, span = float(steps[0]), float(steps[num - 1] - steps[0])
    if span <= 0:
        return None
    shape = fit((at - begin) / span, level)
    wanted = min(begin + span * (1 + lead), float(steps[-1]))
    near = max(3, num // 8)  # losses whose median is the level there
    place = min(int(np.searchsorted(steps, wanted)), len(steps) - 1)
    there = slice(max(num, place - near // 2), place + near // 2 + 1)
    if not len(losses[there]):
        return None
    return abs(float(np.median(losses[there])) - float(shape.at((float(np.median(steps[there])) - begin) / span)[0]))


def piecewise_medians(steps: Floats, values: Floats, most: int = MAX_PIECES) -> tuple[Floats, Floats]:
    """The curve in at most `most` pieces of equally many points: the median step and the median value of each."""
    num = min(most, len(values))
    pieces = [slice(start, end) for start, end in pairwise(np.linspace(0, len(values), num + 1).astype(int).tolist())]
    return np.array([np.median(steps[piece]) for piece in pieces]), np.array([np.median(values[piece]) for piece in pieces])


def robust_std(values: Floats) -> float:
    """A standard deviation that a few outliers do not change."""
    return float(1.4826 * np.median(np.abs(values - np.median(values)))) if len(values) else 0.0

"""Losses of two runs: at equal steps, at equal time, and the step from which on B stays outside of the band of A.

A curve is cut into windows. The band of a window contains most of its losses; B is outside if its median is outside of it by a relevant
distance, and stays outside if that holds for every window up to the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from sonde.run_view import RunView

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]
Side = Literal["same", "higher", "lower", "not finite", "finite", "unknown"]

MAX_WINDOWS = 40  # as many as a plot can show
LEAST = 8  # losses in a window: fewer have no band
ENOUGH = 2 * LEAST  # losses in common: fewer are not compared
BAND = (10.0, 90.0)  # percent: one step in five is outside, by chance
MATTERS = 0.05  # of the level: smooth losses have hardly a band, and 1.00 against 1.02 is no difference
MATTERS_OF_RANGE = 0.02  # of the range of A, if losses are not above zero and a ratio means nothing
PATIENCE = 0.1  # share of the windows, and at least two: one window is chance
LAST = 0.05  # share of a run whose median is its level at the end …
LAST_LEAST, LAST_MOST = 5, 100  # … but at least and at most as many steps
MAX_SERIES = 4  # losses of a program that calls backward in several places


@dataclass(frozen=True, slots=True)
class Window:
    """Some losses in a row."""

    first: int
    last: int
    median: float  # NaN if most are not finite
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Level:
    """The loss around one step."""

    step: int  # -1: none
    value: float


@dataclass(frozen=True, slots=True)
class LossComparison:
    """One loss of both runs."""

    series: str
    num_common: int  # steps in which both computed it
    final_a: Level  # at the last step of each run
    final_b: Level
    best_a: Level
    best_b: Level
    equal_step_a: Level  # at the last step that both reached
    equal_step_b: Level
    equal_time_s: float  # the duration of the shorter run
    equal_time_a: Level
    equal_time_b: Level
    side: Side  # how B ends relative to the band of A, at equal steps
    left_step: int  # from here on B stays outside of the band of A; -1: it does not
    first_bad_a: int  # first step whose loss is not finite; -1: all are
    first_bad_b: int
    curve_a: tuple[Window, ...]
    curve_b: tuple[Window, ...]


def compare_losses(a: RunView, b: RunView) -> list[LossComparison]:
    """The losses that both runs have, under the same names."""
    names = [name for name in a.steps if name == "loss" or name.startswith("loss:")]
    found = [_compare(series, a, b) for series in sorted(names)[:MAX_SERIES] if series in b.steps]
    return [one for one in found if one.final_a.step >= 0 or one.final_b.step >= 0]


def _compare(series: str, a: RunView, b: RunView) -> LossComparison:
    steps_a, losses_a = a.loss_series(series)
    steps_b, losses_b = b.loss_series(series)
    common, in_a, in_b = np.intersect1d(steps_a, steps_b, assume_unique=True, return_indices=True)
    side, left_step = _side_at_end(common, losses_a[in_a], losses_b[in_b])
    curves = windows(steps_a, losses_a), windows(steps_b, losses_b)
    ends = level_of(steps_a, losses_a), level_of(steps_b, losses_b)
    until_s = min(a.total_s, b.total_s)
    return LossComparison(
        series=series,
        num_common=len(common),
        final_a=ends[0],
        final_b=ends[1],
        best_a=_best(curves[0], ends[0]),
        best_b=_best(curves[1], ends[1]),
        equal_step_a=level_of(common, losses_a[in_a]),
        equal_step_b=level_of(common, losses_b[in_b]),
        equal_time_s=until_s,
        equal_time_a=_level_at(a, steps_a, losses_a, until_s),
        equal_time_b=_level_at(b, steps_b, losses_b, until_s),
        side=side,
        left_step=left_step,
        first_bad_a=_first_bad(steps_a, losses_a),
        first_bad_b=_first_bad(steps_b, losses_b),
        curve_a=curves[0],
        curve_b=curves[1],
    )


def windows(steps: Steps, losses: Floats) -> tuple[Window, ...]:
    """The whole curve in at most `MAX_WINDOWS` pieces of equal length."""
    num = min(MAX_WINDOWS, max(len(steps) // LEAST, min(len(steps), 1)))
    return tuple(map(window_of, np.array_split(steps, num), np.array_split(losses, num))) if num else ()


def window_of(steps: Steps, losses: Floats) -> Window:
    finite = losses[np.isfinite(losses)]
    if 2 * len(finite) <= len(losses):
        median = low = high = float("nan")
    else:
        low, median, high = (float(value) for value in np.percentile(finite, (BAND[0], 50.0, BAND[1])))
    return Window(int(steps[0]), int(steps[-1]), median, low, high)


def _side_at_end(common: Steps, losses_a: Floats, losses_b: Floats) -> tuple[Side, int]:
    if len(common) < ENOUGH:
        return "unknown", -1
    curve_b = windows(common, losses_b)
    side, index = ends_outside(windows(common, losses_a), curve_b)
    return side, curve_b[index].first if index >= 0 else -1


def ends_outside(
    curve_a: Sequence[Window], curve_b: Sequence[Window], *, matters: float = MATTERS, least_of_range: float = 0.0
) -> tuple[Side, int]:
    """How B ends relative to the bands of A, and the window from which on it stays there; -1: it does not.

    A difference counts from `matters` of the level on, and from `least_of_range` of the range of A.
    """
    distances = distances_that_matter(curve_a, matters=matters, least_of_range=least_of_range)
    sides = [_side(one, other, distance) for one, other, distance in zip(curve_a, curve_b, distances)]
    ending = sides[-1]
    start = next((index for index in range(len(sides) - 1, -1, -1) if sides[index] != ending), -1) + 1
    # A single window is the whole training.
    is_long_enough = len(sides) - start >= min(max(2, PATIENCE * len(sides)), len(sides))
    if ending == "same" or not (is_long_enough or ending in ("not finite", "finite")):
        return "same", -1
    return ending, start


def distances_that_matter(curve: Sequence[Window], *, matters: float, least_of_range: float) -> list[float]:
    """The smallest relevant distance from the median of each window."""
    levels = [window.median for window in curve if np.isfinite(window.median)]
    span = max(levels) - min(levels) if levels else 0.0
    if not levels or min(levels) <= 0:
        return [max(matters * MATTERS_OF_RANGE / MATTERS, least_of_range) * span] * len(curve)
    return [max(matters * abs(window.median), least_of_range * span) for window in curve]


def _side(a: Window, b: Window, distance: float) -> Side:
    if np.isnan(a.median) != np.isnan(b.median):
        return "not finite" if np.isnan(b.median) else "finite"
    if b.median > max(a.high, a.median + distance):
        return "higher"
    if b.median < min(a.low, a.median - distance):
        return "lower"
    return "same"


def level_of(steps: Steps, losses: Floats) -> Level:
    """The median of the last losses; the last loss itself if it is not finite."""
    if not len(steps):
        return Level(-1, float("nan"))
    last = losses[-int(min(max(LAST * len(losses), LAST_LEAST), LAST_MOST)) :]
    return Level(int(steps[-1]), float(np.median(last[np.isfinite(last)]) if np.isfinite(last[-1]) else last[-1]))


def _level_at(view: RunView, steps: Steps, losses: Floats, until_s: float) -> Level:
    done = view.step_numbers[view.elapsed_s <= until_s * (1 + 1e-9)]
    num = int(np.searchsorted(steps, done[-1], side="right")) if len(done) else 0
    return level_of(steps[:num], losses[:num])


def _best(curve: tuple[Window, ...], end: Level) -> Level:
    levels = [Level(window.last, window.median) for window in curve] + [end]
    return min((level for level in levels if np.isfinite(level.value)), key=lambda level: level.value, default=Level(-1, float("nan")))


def _first_bad(steps: Steps, losses: Floats) -> int:
    bad = np.flatnonzero(~np.isfinite(losses))
    return int(steps[bad[0]]) if len(bad) else -1

"""Two losses side by side: at equal steps, at equal time, and from where on the second stays outside of what the first does by chance.

A curve is cut into windows. The band of a window is what most of its steps lie in; a loss has left the band when its median lies outside
of it and the distance is one that matters. It has left for good when it does so in every window to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from sonde.run_view import RunView

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]
Side = Literal["same", "higher", "lower", "not finite", "finite", "unknown"]

MAX_WINDOWS = 40  # as many as a picture can show apart
LEAST = 8  # losses in a window: fewer have no band
ENOUGH = 2 * LEAST  # losses in common before anybody may say that one ends higher
BAND = (10.0, 90.0)  # percent: one step in five lies outside, by chance
MATTERS = 0.05  # of the level: smooth losses have hardly a band, and nobody minds 1.00 and 1.02
MATTERS_OF_RANGE = 0.02  # of all that the first loss covered, where losses are not above zero and a ratio means nothing
PATIENCE = 0.1  # share of the windows, and at least two: one window is chance
LAST = 0.05  # share of a run whose median is its level at the end …
LAST_LEAST, LAST_MOST = 5, 100  # … but at least and at most so many steps
MAX_SERIES = 4  # losses of a program that calls backward in several places


@dataclass(frozen=True, slots=True)
class Window:
    """Some losses in a row."""

    first: int
    last: int
    median: float  # NaN where most are not finite
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Level:
    """A loss as it was around one moment."""

    step: int  # -1: there is none
    value: float


@dataclass(frozen=True, slots=True)
class LossComparison:
    """One loss of both runs. `a` stands for the first run, `b` for the second."""

    series: str
    num_common: int  # steps in which both computed it
    final_a: Level  # where each ended by itself
    final_b: Level
    best_a: Level
    best_b: Level
    equal_step_a: Level  # at the last step that both reached
    equal_step_b: Level
    equal_time_s: float  # when the first of the two had ended
    equal_time_a: Level
    equal_time_b: Level
    side: Side  # where B ends, seen from A's band, at equal steps
    left_step: int  # from here on B stays outside of A's band; -1: it does not
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
    side, left = _where_b_ends(common, losses_a[in_a], losses_b[in_b])
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
        left_step=left,
        first_bad_a=_first_bad(steps_a, losses_a),
        first_bad_b=_first_bad(steps_b, losses_b),
        curve_a=curves[0],
        curve_b=curves[1],
    )


def windows(steps: Steps, losses: Floats) -> tuple[Window, ...]:
    """The whole curve in at most `MAX_WINDOWS` pieces of equal length."""
    num = min(MAX_WINDOWS, max(len(steps) // LEAST, min(len(steps), 1)))
    return tuple(window_of(some, values) for some, values in zip(np.array_split(steps, num), np.array_split(losses, num))) if num else ()


def window_of(steps: Steps, losses: Floats) -> Window:
    finite = losses[np.isfinite(losses)]
    if 2 * len(finite) <= len(losses):
        median = low = high = float("nan")
    else:
        low, median, high = (float(value) for value in np.percentile(finite, (BAND[0], 50.0, BAND[1])))
    return Window(int(steps[0]), int(steps[-1]), median, low, high)


def _where_b_ends(common: Steps, losses_a: Floats, losses_b: Floats) -> tuple[Side, int]:
    if len(common) < ENOUGH:
        return "unknown", -1
    curve_b = windows(common, losses_b)
    ending, outside = ends_outside(windows(common, losses_a), curve_b)
    return ending, curve_b[outside].first if outside >= 0 else -1


def ends_outside(
    curve_a: Sequence[Window], curve_b: Sequence[Window], *, matters: float = MATTERS, least_of_range: float = 0.0
) -> tuple[Side, int]:
    """Where B ends, seen from the bands of A, and the window from which on it stays there; -1: it does not. Window by window.

    A difference counts from `matters` of the level on, and from `least_of_range` of all that A covered.
    """
    distances = distances_that_matter(curve_a, matters=matters, least_of_range=least_of_range)
    sides = [_side(one, other, distance) for one, other, distance in zip(curve_a, curve_b, distances)]
    ending = sides[-1]
    outside = next((place for place in range(len(sides) - 1, -1, -1) if sides[place] != ending), -1) + 1
    # Where all is one window, it is the whole training.
    long_enough = len(sides) - outside >= min(max(2, PATIENCE * len(sides)), len(sides))
    if ending == "same" or not (long_enough or ending in ("not finite", "finite")):
        return "same", -1
    return ending, outside


def distances_that_matter(curve: Sequence[Window], *, matters: float, least_of_range: float) -> list[float]:
    """How far from the median of each window another must lie."""
    levels = [window.median for window in curve if np.isfinite(window.median)]
    span = max(levels) - min(levels) if levels else 0.0
    if not levels or min(levels) <= 0:
        return [max(matters * MATTERS_OF_RANGE / MATTERS, least_of_range) * span] * len(curve)
    return [max(matters * abs(window.median), least_of_range * span) for window in curve]


def _side(a: Window, b: Window, distance: float) -> Side:
    """Where the median of B lies, seen from the band of A."""
    if np.isnan(a.median) or np.isnan(b.median):
        if np.isnan(a.median) and np.isnan(b.median):
            return "same"
        return "not finite" if np.isnan(b.median) else "finite"
    if b.median > max(a.high, a.median + distance):
        return "higher"
    if b.median < min(a.low, a.median - distance):
        return "lower"
    return "same"


def level_of(steps: Steps, losses: Floats) -> Level:
    """The median over the last losses; one that ends in NaN ends in NaN."""
    if not len(steps):
        return Level(-1, float("nan"))
    num = int(min(max(LAST * len(losses), LAST_LEAST), LAST_MOST))
    last = losses[-num:]
    return Level(int(steps[-1]), _median(last))


def _median(losses: Floats) -> float:
    if not np.isfinite(losses[-1]):
        return float(losses[-1])
    return float(np.median(losses[np.isfinite(losses)]))


def _level_at(view: RunView, steps: Steps, losses: Floats, until_s: float) -> Level:
    done = view.step_numbers[view.elapsed_s <= until_s * (1 + 1e-9)]
    num = int(np.searchsorted(steps, done[-1], side="right")) if len(done) else 0
    return level_of(steps[:num], losses[:num])


def _best(curve: tuple[Window, ...], end: Level) -> Level:
    """The end is a window of its own, and often the best."""
    levels = [Level(window.last, window.median) for window in curve] + [end]
    return min((level for level in levels if np.isfinite(level.value)), key=lambda level: level.value, default=Level(-1, float("nan")))


def _first_bad(steps: Steps, losses: Floats) -> int:
    bad = np.flatnonzero(~np.isfinite(losses))
    return int(steps[bad[0]]) if len(bad) else -1

"""The loss of a run: its columns, and whether the training learns by it.

The answers err in one direction only: where a loss cannot be read (adversarial, negative, too short), the training is not called failing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf, log, nan, sqrt
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sonde.events import CallSiteFound, ModelOutputShape, NonFinite
from sonde.run_view.step_columns import power_of_two_stride
from sonde.runlog.record_index import Ints

if TYPE_CHECKING:
    from sonde.run_view.run_view import RunView

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

FIRST = 3  # losses that make the starting level: more would already have learned at a high rate
RECENT = 25  # losses that make the present level: their median ignores a few bad batches
ENOUGH = 30  # losses before anybody may say that one does not fall: warm-up alone takes ten to twenty
FALLEN = 0.05  # share of the starting level: less than this is not called learning …
FALLEN_SIGMAS = 3.0  # … unless the fall is this many standard errors: a slow learner is a learner
RISEN = 2.0  # times the starting level: healthy losses vary by tens of percents, not by a factor of two
GONE = 3  # losses in a row that are not finite: a GradScaler skips one or two
AT_CHANCE = 0.05  # relative distance to ln K that still counts as guessing; label noise and class balance move it less
BUCKETS = 64  # pieces into which a history is averaged
MAX_SERIES = 1000  # losses of a run: one per line that calls backward


@dataclass(frozen=True, slots=True)
class LossColumns:
    """The loss of each step.

    NaN in a loss scalar means that its line did not call backward in this step; a loss that is NaN has an event. `has_loss` and
    `is_nonfinite` take account of both.
    """

    value: Floats  # the first loss that was computed in the step; NaN if there is none, or if it is known from its event only
    has_loss: Bools
    is_nonfinite: Bools
    nonfinite_after_last: bool  # an event of the step that the run did not complete

    @classmethod
    def of(cls, view: RunView) -> LossColumns:
        value = view.steps["loss"].copy()
        is_nonfinite = np.isinf(value)
        for name in loss_names(view)[1:]:
            column = view.steps[name]
            is_nonfinite |= np.isinf(column)
            value = np.where(np.isnan(value), column, value)
        has_loss = ~np.isnan(value)
        is_after = False
        for row, event in view.events_with_rows(NonFinite):
            if event.what == "loss" and row < view.num_steps:
                is_nonfinite[row] = has_loss[row] = True
            elif event.what == "loss":
                is_after = True
        return cls(value, has_loss, is_nonfinite, is_after)


def loss_names(view: RunView) -> list[str]:
    """The names of the loss scalars: `loss`, `loss:2`, … They are numbered without a gap."""
    names = ["loss"]
    while len(names) < MAX_SERIES and (name := f"loss:{len(names) + 1}") in view.steps:
        names.append(name)
    return names


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some values in a row: how many, their mean, their sum of squared deviations."""

    num: int
    mean: float
    squares: float

    def join(self, other: Bucket) -> Bucket:
        num = self.num + other.num
        delta = other.mean - self.mean
        squares = self.squares + other.squares + delta * delta * self.num * other.num / num
        return Bucket(num, self.mean + delta * other.num / num, squares)


class BucketedHistory:
    """Any number of values in at most `BUCKETS` buckets of equal length, a power of two."""

    def __init__(self, values: Floats) -> None:
        width = power_of_two_stride(len(values), BUCKETS)
        num_whole = len(values) // width
        whole = values[: num_whole * width].reshape(num_whole, width)
        with np.errstate(over="ignore", invalid="ignore"):
            means = whole.mean(axis=1) if num_whole else np.empty(0)
            squares = np.square(whole - means[:, None]).sum(axis=1)
        self.buckets = [Bucket(width, mean, square) for mean, square in zip(means.tolist(), squares.tolist())]
        if len(rest := values[num_whole * width :]):
            with np.errstate(over="ignore", invalid="ignore"):
                mean = float(rest.mean())
                self.buckets.append(Bucket(len(rest), mean, float(np.square(rest - mean).sum())))

    def __len__(self) -> int:
        return len(self.buckets)

    def between(self, start: float, stop: float) -> Bucket:
        """The values from one share of the run to another, e.g. `between(0.5, 1)`; at least one bucket."""
        first = min(int(start * len(self.buckets)), len(self.buckets) - 1)
        last = max(int(stop * len(self.buckets)), first + 1)
        total = self.buckets[first]
        for bucket in self.buckets[first + 1 : last]:
            total = total.join(bucket)
        return total


@dataclass(frozen=True)
class LossTrend:
    """What the loss says about the training."""

    first: Sequence[float]  # the first FIRST finite losses
    recent: Sequence[float]  # the last RECENT ones
    finite: Floats = field(repr=False, default_factory=lambda: np.empty(0))
    num_losses: int = 0
    num_nonfinite: int = 0
    nonfinite_in_a_row: int = 0  # at the end
    first_nonfinite_step: int = -1
    gone_since: int = -1  # first step of the last row of non-finite losses
    first_step: int = -1
    risen_step: int = -1  # first step whose loss was RISEN times the starting level
    worst: float = -inf
    has_several: bool = False  # more than one line calls backward: adversarial, actor-critic, phases
    class_counts: frozenset[int] = frozenset()  # how many classes an output may stand for
    constant_in_a_row: int = 0  # losses at the end that are equal to the last bit
    constant_since: int = -1

    @classmethod
    def of(cls, view: RunView) -> LossTrend:
        skipped = view.counts("skipped_steps") > 0
        return cls.from_columns(
            view.step_numbers,
            view.losses,
            skipped,
            has_several=any(site.call == "backward" and (site.series or "loss") != "loss" for site in view.events(CallSiteFound)),
            class_counts=_class_counts(view.events(ModelOutputShape)),
            after_last=view.step_number(view.num_steps) if view.losses.nonfinite_after_last else -1,
        )

    @classmethod
    def from_columns(
        cls, numbers: Ints, losses: LossColumns, skipped: Bools, *, has_several: bool, class_counts: frozenset[int], after_last: int
    ) -> LossTrend:
        """`skipped`: steps whose update a GradScaler skipped, which takes care of a loss that is not finite. `after_last`: number of the
        step that the run did not complete, if its loss was not finite; else -1."""
        is_finite = losses.has_loss & ~losses.is_nonfinite
        is_bad = losses.is_nonfinite & ~skipped
        finite = losses.value[is_finite]
        after = [after_last] if after_last >= 0 else []
        bad_steps = [*numbers[is_bad].tolist(), *after]
        after_finite = int(np.flatnonzero(is_finite)[-1]) + 1 if len(finite) else 0
        at_end = [*numbers[after_finite:][is_bad[after_finite:]].tolist(), *after]
        starts = _starts_of_rows(is_finite, is_bad)
        gone_since = at_end[0] if at_end else int(numbers[starts[-1]]) if len(starts) else -1
        with_loss = numbers[losses.has_loss]
        first = finite[:FIRST].tolist()
        after_bad = is_finite.copy()
        after_bad[: int(np.flatnonzero(is_bad)[-1]) + 1 if is_bad.any() else 0] = False
        constant, constant_since = _constant_at_end(losses.value[after_bad], numbers[after_bad])
        return cls(
            first=first,
            recent=finite[-RECENT:].tolist(),
            finite=finite,
            num_losses=len(with_loss) + (after_last >= 0),
            num_nonfinite=len(bad_steps),
            nonfinite_in_a_row=len(at_end),
            first_nonfinite_step=bad_steps[0] if bad_steps else -1,
            gone_since=gone_since,
            first_step=int(with_loss[0]) if len(with_loss) else after_last,
            risen_step=_risen_step(first, finite, numbers[is_finite]),
            worst=float(finite.max()) if len(finite) else -inf,
            has_several=has_several,
            class_counts=class_counts,
            constant_in_a_row=0 if at_end else constant,
            constant_since=constant_since,
        )

    @cached_property
    def history(self) -> BucketedHistory:
        return BucketedHistory(self.finite)

    @property
    def first_level(self) -> float:
        return median(self.first) if self.first else nan

    @property
    def recent_level(self) -> float:
        return median(self.recent) if self.recent else nan

    @property
    def is_readable(self) -> bool:
        """Falling means learning: there is one loss, and it is above zero."""
        return not self.has_several and bool(self.first) and min(self.first) > 0 and min(self.recent) > 0

    @property
    def is_gone(self) -> bool:
        """The loss is not finite any more and stays so: also when the run stopped right there."""
        return self.nonfinite_in_a_row >= min(GONE, max(1, self.num_losses - len(self.first)))

    @property
    def has_risen(self) -> bool:
        return self.is_readable and self.num_losses > FIRST and self.recent_level > RISEN * max(self.first)

    @property
    def has_fallen(self) -> bool:
        """The loss is lower than it was in the beginning, by a margin or beyond chance."""
        if len(self.recent) < 2:
            return False
        fall = self.first_level - self.recent_level
        return fall > FALLEN * abs(self.first_level) or (fall > 0 and self._declines(0.0))

    @property
    def is_flat(self) -> bool:
        """Nothing was gained after the first tenth of the run: at most an output bias was fitted."""
        if not self.is_readable or self.num_losses < ENOUGH or len(self.history) < 4:
            return False
        early, late = self.history.between(0.1, 0.3), self.history.between(0.7, 1.0)
        return early.mean - late.mean < FALLEN * abs(early.mean) and not self._declines(0.1)

    @property
    def has_fallen_at_times(self) -> bool:
        """In one quarter of the run the loss is lower than in the quarter before: also where a second task began anew."""
        quarters = [(part / 4, (part + 1) / 4) for part in range(4)] if len(self.history) >= 8 else []
        return any(self._is_below(self.history.between(*early), self.history.between(*late)) for early, late in pairwise(quarters))

    def _declines(self, start: float) -> bool:
        """From one share of the run on: is the second half below the first by more than the noise explains?"""
        middle = (1 + start) / 2
        return self._is_below(self.history.between(start, middle), self.history.between(middle, 1.0))

    @staticmethod
    def _is_below(early: Bucket, late: Bucket) -> bool:
        """Whether the later losses are below the earlier ones by more than the noise explains."""
        if min(early.num, late.num) < 2:
            return False
        error = sqrt(early.squares / early.num / early.num + late.squares / late.num / late.num)
        return early.mean - late.mean > FALLEN_SIGMAS * error and error > 0

    @property
    def chance(self) -> int:
        """The number of classes whose blind guess costs as much as the present loss; 0 if there is none."""
        if not self.is_readable:
            return 0
        near = [k for k in self.class_counts if abs(self.recent_level - log(k)) <= AT_CHANCE * log(k)]
        return min(near, key=lambda k: abs(self.recent_level - log(k)), default=0)

    @property
    def failing(self) -> str:
        """How the training fails, to be put into a sentence; empty if it learns or if nobody can tell."""
        if self.is_gone and self.num_nonfinite:
            return f"the loss is not finite from step {self.gone_since} on"
        if self.has_risen:
            return f"the loss rose from {self.first_level:.3g} to {self.recent_level:.3g}"
        if self.is_readable and self.num_losses >= ENOUGH and not self.has_fallen:
            return f"the loss did not fall ({self.first_level:.3g} at first, {self.recent_level:.3g} at the end)"
        return ""

    @property
    def stuck(self) -> str:
        """As `failing`, or flat after a first small fall: only for rules whose other evidence is strong."""
        if self.failing or not self.is_flat:
            return self.failing
        early, late = self.history.between(0.1, 0.3).mean, self.history.between(0.7, 1.0).mean
        return f"the loss stays where it was after the first steps ({early:.3g}, then {late:.3g})"


def _starts_of_rows(is_finite: Bools, is_bad: Bools) -> Ints:
    """Where non-finite losses begin: the first ones, and those after a finite one. Skipped steps in between do not count."""
    relevant = np.flatnonzero(is_finite | is_bad)
    bad = is_bad[relevant]
    begins = bad.copy()
    begins[1:] &= ~bad[:-1]
    return relevant[begins]


def _risen_step(first: Sequence[float], finite: Floats, numbers: Ints) -> int:
    if len(first) < FIRST or min(first) <= 0:
        return -1
    risen = np.flatnonzero(finite[FIRST:] > RISEN * max(first))
    return int(numbers[FIRST + risen[0]]) if len(risen) else -1


def _constant_at_end(finite: Floats, numbers: Ints) -> tuple[int, int]:
    """How many finite losses at the end are equal, and the step of the first of them."""
    if not len(finite):
        return 0, -1
    different = np.flatnonzero(finite != finite[-1])
    start = int(different[-1]) + 1 if len(different) else 0
    return len(finite) - start, int(numbers[start])


def _class_counts(outputs: Sequence[ModelOutputShape]) -> frozenset[int]:
    counts: set[int] = set()
    for output in outputs:
        if len(output.shape) < 2 or len(counts) > BUCKETS:
            counts.add(2)  # one number per sample: a binary decision, if a decision at all
        else:
            counts |= {max(size, 2) for size in (output.shape[-1], output.shape[1])}  # classes come last, or second before positions
    return frozenset(counts)

"""Is the training really failing? The question that every threshold must be asked together with.

A fold over the loss with bounded state: where it began, where it is now, how it went in between, what is not finite.
Its answers are made for being wrong in one direction only: where a loss cannot be read (adversarial, negative, too
short), it does not call a training failing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf, isfinite, log, nan, sqrt
from statistics import median

from sonde.events import Step
from sonde.rules.activity import count

FIRST = 3  # losses that make the starting level: more would already have learnt at a high rate
RECENT = 25  # losses that make the present level: their median ignores a few bad batches
ENOUGH = 30  # losses before anybody may say that one does not fall: warm-up alone takes ten to twenty
FALLEN = 0.05  # share of the starting level: less than this is not called learning …
FALLEN_SIGMAS = 3.0  # … unless the fall is this many standard errors: a slow learner is a learner
RISEN = 2.0  # times the starting level: healthy losses wander by tens of percents, not to the double
GONE = 3  # losses in a row that are not finite: a GradScaler skips one or two
AT_CHANCE = 0.05  # relative distance to ln K that still counts as guessing; label noise and class balance move it less
BUCKETS = 64  # pieces in which the whole history is kept


def losses(step: Step) -> tuple[dict[str, float], bool]:
    """The losses that were computed in this step, by series, and whether one of them was not finite.

    A scalar of NaN alone says only that this line of code did not call backward; a loss that is NaN comes with an event.
    """
    scalars = step.scalars
    loss = scalars.get("loss", nan)
    found = {"loss": loss} if loss == loss else {}
    series = 2
    while (name := f"loss:{series}") in scalars:  # the series are numbered without a gap
        if scalars[name] == scalars[name]:
            found[name] = scalars[name]
        series += 1
    bad = any(not isfinite(value) for value in found.values())
    return found, bad or any(event.kind == "nonfinite" and event.data.get("what") == "loss" for event in step.events)


@dataclass(slots=True)
class Bucket:
    """Some losses in a row: how many, their mean, their sum of squared deviations."""

    num: int
    mean: float
    squares: float

    def join(self, other: Bucket) -> Bucket:
        num = self.num + other.num
        delta = other.mean - self.mean
        return Bucket(
            num, self.mean + delta * other.num / num, self.squares + other.squares + delta * delta * self.num * other.num / num
        )


@dataclass(slots=True)
class LossHistory:
    """Any number of values in at most `BUCKETS` pieces of equal length: when they are full, neighbours are joined."""

    pieces: list[Bucket] = field(default_factory=list)
    width: int = 1

    def add(self, value: float) -> None:
        fresh = Bucket(1, value, 0.0)
        if self.pieces and self.pieces[-1].num < self.width:
            self.pieces[-1] = self.pieces[-1].join(fresh)
            return
        if len(self.pieces) == BUCKETS:
            self.pieces = [left.join(right) for left, right in zip(self.pieces[::2], self.pieces[1::2])]
            self.width *= 2
        self.pieces.append(fresh)

    def between(self, start: float, stop: float) -> Bucket:
        """The values from one share of the run to another, e.g. `between(0.5, 1)`; at least one piece."""
        first = min(int(start * len(self.pieces)), len(self.pieces) - 1)
        last = max(int(stop * len(self.pieces)), first + 1)
        total = self.pieces[first]
        for piece in self.pieces[first + 1 : last]:
            total = total.join(piece)
        return total


@dataclass(slots=True)
class Learning:
    """What the loss says about the training so far."""

    first: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    history: LossHistory = field(default_factory=LossHistory)
    num_losses: int = 0
    num_nonfinite: int = 0
    nonfinite_in_a_row: int = 0
    first_nonfinite_step: int = -1
    gone_since: int = -1  # first step of the present row of non-finite losses
    first_step: int = -1
    risen_step: int = -1  # first step whose loss was RISEN times the starting level
    worst: float = -inf
    several: bool = False  # more than one line calls backward: adversarial, actor-critic, phases
    widths: set[int] = field(default_factory=set)  # how many classes an output may stand for
    constant_in_a_row: int = 0  # losses in a row that are equal to the last bit
    constant_since: int = -1
    _last: float = inf

    def see(self, step: Step) -> None:
        for event in step.events:
            if event.kind == "source" and event.data.get("call") == "backward" and event.data.get("series", "loss") != "loss":
                self.several = True
            elif event.kind == "output":
                self._see_output(event.data.get("shape"))
        found, bad = losses(step)
        if not found and not bad:
            return
        self.num_losses += 1
        if self.first_step < 0:
            self.first_step = step.number
        if not bad:
            self._see_finite(step.number, next(iter(found.values())))
        elif count(step, "skipped_steps") == 0:  # a scaler that skips the step has dealt with it
            self.num_nonfinite += 1
            self.nonfinite_in_a_row += 1
            if self.first_nonfinite_step < 0:
                self.first_nonfinite_step = step.number
            if self.nonfinite_in_a_row == 1:
                self.gone_since = step.number
            self.constant_in_a_row = 0

    def _see_finite(self, number: int, loss: float) -> None:
        self.nonfinite_in_a_row = 0
        if len(self.first) < FIRST:
            self.first.append(loss)
        elif self.risen_step < 0 and min(self.first) > 0 and loss > RISEN * max(self.first):
            self.risen_step = number
        self.worst = max(self.worst, loss)
        self.recent.append(loss)
        self.history.add(loss)
        if loss == self._last:
            self.constant_in_a_row += 1
        else:
            self.constant_in_a_row = 1
            self.constant_since = number
        self._last = loss

    def _see_output(self, shape: object) -> None:
        if not isinstance(shape, (list, tuple)) or not all(isinstance(size, int) for size in shape):
            return
        sizes = [int(size) for size in shape]
        if len(sizes) < 2 or len(self.widths) > BUCKETS:
            self.widths.add(2)  # one number per sample: a binary decision, if a decision at all
            return
        for size in {sizes[-1], sizes[1]}:  # classes come last, or second where images or sequences follow
            self.widths.add(max(size, 2))

    @property
    def first_level(self) -> float:
        return median(self.first) if self.first else float("nan")

    @property
    def recent_level(self) -> float:
        return median(self.recent) if self.recent else float("nan")

    @property
    def readable(self) -> bool:
        """Falling means learning here: one loss, above zero."""
        return not self.several and bool(self.first) and min(self.first) > 0 and min(self.recent) > 0

    @property
    def gone(self) -> bool:
        """The loss stopped being a number and stays so: also when the run stopped right there."""
        return self.nonfinite_in_a_row >= min(GONE, max(1, self.num_losses - len(self.first)))

    @property
    def risen(self) -> bool:
        return self.readable and self.num_losses > FIRST and self.recent_level > RISEN * max(self.first)

    @property
    def fallen(self) -> bool:
        """The loss is lower than it was in the beginning, by a margin or beyond chance."""
        if len(self.recent) < 2:
            return False
        fall = self.first_level - self.recent_level
        return fall > FALLEN * abs(self.first_level) or (fall > 0 and self._declines(0.0))

    @property
    def flat(self) -> bool:
        """Nothing was gained after the first tenth of the run: at most an output bias was fitted."""
        if not self.readable or self.num_losses < ENOUGH or len(self.history.pieces) < 4:
            return False
        early, late = self.history.between(0.1, 0.3), self.history.between(0.7, 1.0)
        return early.mean - late.mean < FALLEN * abs(early.mean) and not self._declines(0.1)

    def _declines(self, start: float) -> bool:
        """From one share of the run on: is the second half below the first by more than the noise explains?"""
        middle = (1 + start) / 2
        early, late = self.history.between(start, middle), self.history.between(middle, 1.0)
        if min(early.num, late.num) < 2:
            return False
        error = sqrt(early.squares / early.num / early.num + late.squares / late.num / late.num)
        return early.mean - late.mean > FALLEN_SIGMAS * error and error > 0

    @property
    def chance(self) -> int:
        """The number of classes whose blind guess costs as much as the present loss; 0 where there is none."""
        if not self.readable:
            return 0
        near = [k for k in self.widths if abs(self.recent_level - log(k)) <= AT_CHANCE * log(k)]
        return min(near, key=lambda k: abs(self.recent_level - log(k)), default=0)

    @property
    def failing(self) -> str:
        """How the training fails, to be put into a sentence; empty where it learns or where nobody can tell."""
        if self.gone and self.num_nonfinite:
            return f"the loss is not finite from step {self.gone_since} on"
        if self.risen:
            return f"the loss rose from {self.first_level:.3g} to {self.recent_level:.3g}"
        if self.readable and self.num_losses >= ENOUGH and not self.fallen:
            return f"the loss did not fall ({self.first_level:.3g} at first, {self.recent_level:.3g} at the end)"
        return ""

    @property
    def stuck(self) -> str:
        """As `failing`, or flat after a first small fall: only for rules whose other evidence is strong."""
        if self.failing:
            return self.failing
        if self.flat:
            early, late = self.history.between(0.1, 0.3).mean, self.history.between(0.7, 1.0).mean
            return f"the loss stays where it was after the first steps ({early:.3g}, then {late:.3g})"
        return ""

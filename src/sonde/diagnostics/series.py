"""One number over the steps of a training, bounded in memory however long that is."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite

import numpy as np
import numpy.typing as npt

MAX_POINTS = 4096  # beyond, every second is dropped; what is not finite stays
PIECES = 64  # in which a curve is looked at as a whole: their medians are calm enough to fit, and few enough to fit often

Floats = npt.NDArray[np.float64]


class Series:
    """Takes values step by step."""

    __slots__ = ("_every", "_skipped", "num", "num_bad", "steps", "values")

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self.num = self.num_bad = 0
        self._every, self._skipped = 1, 0

    def see(self, step: int, value: float) -> None:
        self.num += 1
        if not isfinite(value):
            self.num_bad += 1
        self._skipped += 1
        if self._skipped < self._every and isfinite(value):
            return
        self._skipped = 0
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) >= 2 * MAX_POINTS:
            kept = [i for i, one in enumerate(self.values) if i % 2 or not isfinite(one)][-MAX_POINTS * 3 // 2 :]
            self.steps, self.values = [self.steps[i] for i in kept], [self.values[i] for i in kept]
            self._every *= 2

    def __len__(self) -> int:
        return self.num

    def finite(self) -> tuple[Floats, Floats]:
        """Steps and values, in the order of the steps, without what is not finite."""
        steps, values = np.array(self.steps, np.float64), np.array(self.values, np.float64)
        good = np.isfinite(values)
        steps, values = steps[good], values[good]
        order = np.argsort(steps, kind="stable")
        return steps[order], values[order]


def pieces(steps: Floats, values: Floats, most: int = PIECES) -> tuple[Floats, Floats]:
    """The curve in at most `most` pieces of equally many points: the middle step and the median of each."""
    num = min(most, len(values))
    if num == len(values):
        return steps, values
    cuts = np.linspace(0, len(values), num + 1).astype(int)
    middle = np.array([np.median(steps[start:end]) for start, end in pairwise(cuts.tolist())])
    return middle, np.array([np.median(values[start:end]) for start, end in pairwise(cuts.tolist())])


def spread(values: Floats) -> float:
    """A standard deviation that a few outliers do not move."""
    return float(1.4826 * np.median(np.abs(values - np.median(values)))) if len(values) else 0.0

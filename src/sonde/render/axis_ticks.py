"""Axes for plots and terminals: linear, logarithmic or logarithmic to both sides of zero, with ticks; labels beside many rows.

Positions are shares of the axis, 0 to 1: a plot and a terminal draw the same axis, and no range of floats (1e-320 to 1e300) overflows.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sonde.render.terminal.sparkline import LOG_FROM

Floats = NDArray[np.float64]
Scale = Literal["linear", "log", "signed log"]

SPREAD = 1000.0  # a distribution asks for decades later than a curve: a normal one has values near zero as well
LARGEST = sys.float_info.max
SAME = 1e-12  # of the largest value: closer than that, ticks between two values would have the same label
SHARES = (0.01, 0.5, 0.99)


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale between two ends. `low` and `high` are in the unit of the scale: the value itself, or decades."""

    scale: Scale
    low: float
    high: float
    unit: float = 1.0  # signed log: where it turns from linear to logarithmic
    zero: bool = False  # log: zeros have a place of their own at the low end

    @property
    def scale_note(self) -> str:
        """` (log)` for a label; empty where the axis is linear."""
        return "" if self.scale == "linear" else f" ({self.scale})"

    def place(self, values: ArrayLike) -> Floats:
        """Shares of the axis; NaN for what is not finite."""
        given = np.asarray(values, np.float64)
        heights = np.where(np.isfinite(given), self._heights(given), np.nan)
        return np.asarray((heights / 2 - self.low / 2) / (self.high / 2 - self.low / 2))  # halved: a distance may overflow

    def values(self, shares: ArrayLike) -> Floats:
        shares = np.asarray(shares, np.float64)
        heights = self.low * (1 - shares) + self.high * shares
        with np.errstate(over="ignore", under="ignore"):
            if self.scale == "log":
                heights = np.power(10.0, heights)
            elif self.scale == "signed log":
                heights = np.sign(heights) * self.unit * (np.power(10.0, np.abs(heights)) - 1.0)
        return np.asarray(np.clip(heights, -LARGEST, LARGEST))

    def ticks(self, limit: int = 6) -> list[tuple[float, str]]:
        """Positions and labels, not more than about `limit`."""
        values = np.array(list(dict.fromkeys(self._tick_values(max(limit, 2)))), np.float64)
        places = self.place(values)
        visible = (places >= -1e-9) & (places <= 1 + 1e-9)
        if self.scale != "linear":  # zero is nearer to its neighbors than they are to theirs
            visible &= (values == 0) | (np.abs(places - float(self.place(0.0))) > 0.5 / max(limit, 5))
        numbers = values[visible].tolist()
        labels = even_labels(numbers) if self.scale == "linear" else _powered(numbers)
        return list(zip(places[visible].tolist(), labels))

    def _heights(self, given: Floats) -> Floats:
        if self.scale == "linear":
            return given
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.scale == "log":
                heights = np.log10(given)
                return np.where(given <= 0, self.low, heights) if self.zero else heights
            sizes = np.logaddexp(0.0, np.log(np.abs(given)) - math.log(self.unit)) / math.log(10.0)
            return np.asarray(np.sign(given) * sizes)

    def _tick_values(self, limit: int) -> Iterator[float]:
        if self.scale == "linear":
            yield from _round_numbers(self.low, self.high, limit)
        elif self.scale == "log":
            if self.zero:
                yield 0.0
            yield from _powers(self.low, self.high, limit)
        else:
            start = math.floor(math.log10(self.unit)) + 1
            reach = math.log10(self.unit) + max(abs(self.low), abs(self.high))
            sides = max((self.low < 0) + (self.high > 0), 1)
            powers = list(_powers(start, max(reach, start), max(limit // sides - 1, 1), within=False))
            yield from (-power for power in reversed(powers) if self.low < 0)
            yield 0.0
            yield from (power for power in powers if self.high > 0)


def curve_axis(values: Floats) -> Axis:
    """An axis for values in their order (norms by step, losses): logarithmic where they are positive over two decades."""
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    if not finite.size or finite.min() < 0 or not positive.size:
        return _signed_or_linear(finite)
    if positive.max() / LOG_FROM > positive.min():
        return log_axis(positive, zero=positive.size < finite.size)
    return _linear(finite)


def spread_axis(values: Floats) -> Axis:
    """An axis for a distribution: logarithmic where a linear one would put nearly all values into one bin."""
    finite = values[np.isfinite(values)]
    if not finite.size or finite.min() < 0:
        return _signed_or_linear(finite)
    positive = finite[finite > 0]
    if positive.size:
        low, middle, high = np.quantile(positive, SHARES).tolist()
        if high / SPREAD > low or positive.max() / SPREAD > middle:
            return log_axis(positive, zero=positive.size < finite.size)
    return _linear(finite)


def linear_axis(low: float, high: float) -> Axis:
    """A linear axis with exactly these ends, or with some room around them where they are one number."""
    low, high = float(low), float(high)  # numpy's floats would warn about overflow
    if high / 2 - low / 2 <= SAME * max(abs(low), abs(high)):
        room = max(abs(low), abs(high)) * 0.1 or 0.5
        low, high = max(low - room, -LARGEST), min(high + room, LARGEST)
    return Axis("linear", low, high)


def _linear(finite: Floats) -> Axis:
    return linear_axis(float(finite.min()), float(finite.max())) if finite.size else Axis("linear", 0.0, 1.0)


def _signed_or_linear(finite: Floats) -> Axis:
    sizes = np.abs(finite[finite != 0])
    if not sizes.size:
        return _linear(finite)
    largest, (low, middle, _) = float(sizes.max()), np.quantile(sizes, SHARES).tolist()
    if largest / SPREAD <= middle:
        return _linear(finite)
    axis = Axis("signed log", 0.0, 1.0, unit=10.0 ** max(math.floor(math.log10(low)), -307))
    ends = axis._heights(np.array([finite.min(), finite.max()])).tolist()
    return Axis("signed log", min(ends[0], 0.0), max(ends[1], 0.0), unit=axis.unit)


def log_axis(positive: Floats, *, zero: bool = False) -> Axis:
    """A logarithmic axis over these values; with `zero`, zeros have a place at its low end."""
    low, high = math.log10(positive.min()), math.log10(positive.max())
    if high <= low:
        low, high = low - 0.5, high + 0.5
    return Axis("log", low - max((high - low) * 0.08, 0.3) if zero else low, high, zero=zero)


def _powers(low: float, high: float, limit: int, *, within: bool = True) -> Iterator[float]:
    """Powers of ten, every second or third … where there are many; 1, 2, 5 where there are few."""
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    if within and last - first < 2:
        for power in range(first - 1, last + 1):
            yield from (factor * 10.0**power for factor in (1, 2, 5) if low <= math.log10(factor) + power <= high)
        return
    stride = max(math.ceil((last - first + 1) / limit), 1)
    yield from (10.0**power for power in range(first, last + 1, stride) if -323 <= power <= 308)


def _round_numbers(low: float, high: float, limit: int) -> Iterator[float]:
    rough = high / limit - low / limit
    base = 10.0 ** max(math.floor(math.log10(rough)), -320) if rough > 0 else 1.0
    step = next((factor * base for factor in (1, 2, 5, 10) if factor * base >= rough), 10 * base)
    if not math.isfinite(step):
        yield from (low, high)
        return
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    yield from (number * step for number in range(first, min(last, first + 2 * limit) + 1))


def even_labels(numbers: list[float], extra: int = 0) -> list[str]:
    """Labels of equal steps with the same number of decimals: as many as the step has, and `extra`."""
    largest = max((abs(number) for number in numbers), default=0.0)
    steps = [abs(b - a) for a, b in pairwise(numbers)]
    step = min((step for step in steps if 0 < step < math.inf), default=largest)
    if not largest or not step:
        return [short(number) for number in numbers]
    if 1e-3 <= largest < 1e6:
        decimals = max(extra - math.floor(math.log10(step) + 1e-9), 0)
        if decimals <= 6:
            return [f"{number + 0.0:.{decimals}f}" for number in numbers]
    digits = max(math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9) + extra, 0)
    return ["0" if not number else _tidy(f"{number:.{min(digits, 15)}e}") for number in numbers]


def _powered(numbers: list[float]) -> list[str]:
    """Labels of powers: all as powers where one of them must be."""
    plain = [short(number) for number in numbers]
    if not any("e" in label for label in plain):
        return plain
    return [label if abs(number) in (0.0, 0.1, 1.0, 10.0) else _scientific(number) for number, label in zip(numbers, plain)]


def short(number: float) -> str:
    """`0.001`, `1000`, `1e-5`: a round number in few characters."""
    return f"{number:g}" if not number or 1e-3 <= abs(number) < 1e4 else _scientific(number)


def _scientific(number: float) -> str:
    digits, _, power = f"{number:.2e}".partition("e")
    return _tidy(f"{float(digits):g}e{power}")


def _tidy(text: str) -> str:
    """`1e+06` as `1e6`, `-2.50e-07` as `-2.50e-7`."""
    digits, _, power = text.partition("e")
    return f"{digits}e{int(power)}"


class RowLabel(NamedTuple):
    """The rows `first` to `last` and their common name."""

    text: str
    first: int
    last: int

    @property
    def middle(self) -> float:
        return (self.first + self.last) / 2


def row_labels(names: Sequence[str], limit: int) -> list[RowLabel]:
    """At most `limit` labels for rows in their order: names, or modules, or every n-th name."""
    if len(names) <= limit:
        return [RowLabel(name, row, row) for row, name in enumerate(names)]
    parts = [name.split(".") for name in names]
    for depth in range(max(map(len, parts)), 0, -1):
        groups = _groups(parts, depth)
        if len(groups) <= limit:
            if len(groups) * 8 < limit:
                break  # one module for hundreds of rows is less informative than some of their names
            return groups
    stride = -(-len(names) // limit)
    return [RowLabel(names[row], row, row) for row in range(0, len(names), stride)]


def _groups(parts: Sequence[Sequence[str]], depth: int) -> list[RowLabel]:
    groups = groupby(range(len(parts)), key=lambda row: parts[row][:depth])
    return [RowLabel(".".join(prefix), (rows := list(members))[0], rows[-1]) for prefix, members in groups]

"""Line charts as inline SVG. Where a value is not finite, the line ends and a red band is in its place."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from sonde.formatting import number
from sonde.render.axis_ticks import linear_axis, log_axis
from sonde.render.terminal.sparkline import is_log

WIDTH, HEIGHT = 860, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 22, 24
NUM_TICKS = 4


class ChartLine(NamedTuple):
    """One series over steps. `tone` is a class of the style sheet; `low` and `high`, where given, are drawn as a band around it."""

    steps: Sequence[int]
    values: Sequence[float]
    tone: str = ""
    label: str = ""  # shown before the name of a non-finite value
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def line_chart(lines: Sequence[ChartLine], *, name: str) -> str:
    """The series on the same axes; empty where none has steps."""
    lines = [line for line in lines if line.steps]
    if not lines:
        return ""
    finite = [value for line in lines for value in (*line.values, *line.low, *line.high) if math.isfinite(value)] or [0.0, 1.0]
    axis = log_axis(np.array(finite)) if is_log(finite) else linear_axis(min(finite), max(finite))
    first = min(line.steps[0] for line in lines)
    last = max(first + 1, *(line.steps[-1] for line in lines))

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def points(steps: Iterable[int], values: Sequence[float]) -> str:
        return " ".join(f"{x(step):.1f},{y(share):.1f}" for step, share in zip(steps, axis.place(values).tolist()))

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)} by step">']
    for share in np.linspace(0, 1, NUM_TICKS):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(share):.1f}" y2="{y(share):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{number(float(axis.values(share)))}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">step {first}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">step {last}</text>')
    for line in lines:
        for piece in _pieces(zip(line.steps, line.low, line.high)):
            if len(piece) > 1:
                steps, low, high = zip(*piece)
                parts.append(f'<polygon class="{_tone("band", line)}" points="{points(steps + steps[::-1], high + low[::-1])}"/>')
    for line in lines:
        for piece in _pieces(zip(line.steps, line.values)):
            drawn = points(*zip(*piece))
            if len(piece) > 1:
                parts.append(f'<polyline class="{_tone("curve", line)}" points="{drawn}"/>')
            else:
                cx, cy = drawn.split(",")
                parts.append(f'<circle class="{_tone("point", line)}" cx="{cx}" cy="{cy}" r="2.5"/>')
    for place, line in enumerate(lines):
        parts.extend(_marks(line, x, top=TOP - 8 + 14 * place))
    return "".join([*parts, "</svg>"])


def _tone(kind: str, line: ChartLine) -> str:
    return f"{kind} {line.tone}".strip()


def _pieces(points: Iterable[tuple[Any, ...]], *, finite: bool = True) -> Iterator[list[tuple[Any, ...]]]:
    """Points in a row whose values are all finite, or all not."""
    for is_finite, piece in groupby(points, key=lambda point: all(map(math.isfinite, point[1:]))):
        if is_finite == finite:
            yield list(piece)


def _marks(line: ChartLine, x: Callable[[float], float], *, top: float) -> Iterator[str]:
    """A band over each stretch of non-finite values; the first value is named."""
    bad = list(_pieces(zip(line.steps, line.values), finite=False))
    for piece in bad:
        left, right = x(piece[0][0]) - 1, x(piece[-1][0]) + 1
        yield f'<rect class="bad" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
    if bad:
        step, value = bad[0][0]
        side = "end" if x(step) > WIDTH - 160 else "start"  # the label is on the side that has room for it
        whose = f"{escape(line.label)}: " if line.label else ""
        yield f'<text class="badname" x="{x(step):.1f}" y="{top}" text-anchor="{side}">{whose}{number(value)} from step {step}</text>'

"""A curve as inline SVG: nothing to load, nothing to execute.

Where a value is not finite the curve ends and a red band stands in its place.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby

from sonde.rules.words import number
from sonde.views.sparkline import is_log

WIDTH, HEIGHT = 860, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 22, 24
NUM_TICKS = 4
LARGEST = sys.float_info.max


def curve(steps: Sequence[int], values: Sequence[float], *, name: str) -> str:
    """One series over steps; empty where there is nothing to draw."""
    if not steps:
        return ""
    logarithmic = is_log(values)
    heights = [math.log10(value) if logarithmic and math.isfinite(value) else value for value in values]
    finite = [height for height in heights if math.isfinite(height)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if high / 2 - low / 2 <= 0:
        room = abs(high) * 0.1 or 1.0
        low, high = max(low - room, -LARGEST), min(high + room, LARGEST)
    first, last = steps[0], max(steps[-1], steps[0] + 1)

    def x(step: int) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(height: float) -> float:
        share = (height / 2 - low / 2) / (high / 2 - low / 2)  # halved: the distance of two floats may overflow
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)} by step">']
    for tick in range(NUM_TICKS):
        share = tick / (NUM_TICKS - 1)
        height = low * (1 - share) + high * share
        label = number(10 ** min(height, 308) if logarithmic else height)  # there is no 10 ** 308.3
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(height):.1f}" y2="{y(height):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(height) + 4:.1f}" text-anchor="end">{label}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">step {first}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">step {last}</text>')
    for piece in _pieces(steps, heights):
        if len(piece) == 1:
            parts.append(f'<circle class="point" cx="{x(piece[0][0]):.1f}" cy="{y(piece[0][1]):.1f}" r="2.5"/>')
        else:
            points = " ".join(f"{x(step):.1f},{y(height):.1f}" for step, height in piece)
            parts.append(f'<polyline class="curve" points="{points}"/>')
    parts.extend(_marks(steps, values, x))
    return "".join([*parts, "</svg>"])


def _pieces(steps: Sequence[int], heights: Sequence[float]) -> Iterator[list[tuple[int, float]]]:
    """The stretches of the curve without a bad number in them."""
    piece: list[tuple[int, float]] = []
    for step, height in zip(steps, heights):
        if math.isfinite(height):
            piece.append((step, height))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _marks(steps: Sequence[int], values: Sequence[float], x: Callable[[int], float]) -> Iterator[str]:
    """A band over each stretch of bad numbers; the first is named."""
    height = HEIGHT - TOP - BOTTOM
    bad: list[tuple[int, float]] = []
    for finite, stretch in groupby(zip(steps, values), key=lambda point: math.isfinite(point[1])):
        if finite:
            continue
        points = list(stretch)
        bad.extend(points)
        left, right = x(points[0][0]) - 1, x(points[-1][0]) + 1
        yield f'<rect class="bad" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{height}"/>'
    if bad:
        step, value = bad[0]
        end = x(step) > WIDTH - 160  # the name stands on the side that has room for it
        place = f'x="{x(step):.1f}" y="{TOP - 8}" text-anchor="{"end" if end else "start"}"'
        yield f'<text class="badname" {place}>{number(value)} from step {step}</text>'

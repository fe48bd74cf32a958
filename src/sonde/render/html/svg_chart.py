"""Line charts as inline SVG. Where a value is not finite, the line ends and a red band is in its place."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from sonde.formatting import number
from sonde.render.terminal.sparkline import is_log

WIDTH, HEIGHT = 860, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 22, 24
NUM_TICKS = 4
LARGEST = sys.float_info.max

Place = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class ChartLine:
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
    everything = [value for line in lines for value in (*line.values, *line.low, *line.high)]
    logarithmic = is_log(everything)

    def height_of(value: float) -> float:
        return math.log10(value) if logarithmic and math.isfinite(value) else value

    finite = [height for value in everything if math.isfinite(height := height_of(value))]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if high / 2 - low / 2 <= 0:
        room = abs(high) * 0.1 or 1.0
        low, high = max(low - room, -LARGEST), min(high + room, LARGEST)
    first = min(line.steps[0] for line in lines)
    last = max(first + 1, *(line.steps[-1] for line in lines))

    def x(step: float) -> float:
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
    for line in lines:
        parts.extend(_band(line, lambda value: y(height_of(value)), x))
    for line in lines:
        parts.extend(_line(line, [height_of(value) for value in line.values], x, y))
    for place, line in enumerate(lines):
        parts.extend(_marks(line, x, top=TOP - 8 + 14 * place))
    return "".join([*parts, "</svg>"])


def _line(line: ChartLine, heights: Sequence[float], x: Place, y: Place) -> Iterator[str]:
    for piece in _pieces(line.steps, heights):
        if len(piece) == 1:
            tone = f"point {line.tone}".strip()
            yield f'<circle class="{tone}" cx="{x(piece[0][0]):.1f}" cy="{y(piece[0][1]):.1f}" r="2.5"/>'
        else:
            points = " ".join(f"{x(step):.1f},{y(height):.1f}" for step, height in piece)
            yield f'<polyline class="{f"curve {line.tone}".strip()}" points="{points}"/>'


def _band(line: ChartLine, y: Place, x: Place) -> Iterator[str]:
    """Between low and high, wherever both are numbers."""
    edges = list(zip(line.steps, line.low, line.high))
    for finite, stretch in groupby(edges, key=lambda edge: math.isfinite(edge[1]) and math.isfinite(edge[2])):
        rows = list(stretch)
        if finite and len(rows) > 1:
            points = [(step, high) for step, _, high in rows] + [(step, low) for step, low, _ in reversed(rows)]
            shown = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
            yield f'<polygon class="{f"band {line.tone}".strip()}" points="{shown}"/>'


def _pieces(steps: Sequence[int], heights: Sequence[float]) -> Iterator[list[tuple[int, float]]]:
    """The parts of the line between non-finite values."""
    piece: list[tuple[int, float]] = []
    for step, height in zip(steps, heights):
        if math.isfinite(height):
            piece.append((step, height))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _marks(line: ChartLine, x: Place, *, top: float) -> Iterator[str]:
    """A band over each stretch of non-finite values; the first value is named."""
    height = HEIGHT - TOP - BOTTOM
    bad: list[tuple[int, float]] = []
    for finite, stretch in groupby(zip(line.steps, line.values), key=lambda point: math.isfinite(point[1])):
        if finite:
            continue
        points = list(stretch)
        bad.extend(points)
        left, right = x(points[0][0]) - 1, x(points[-1][0]) + 1
        yield f'<rect class="bad" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{height}"/>'
    if bad:
        step, value = bad[0]
        end = x(step) > WIDTH - 160  # the label is on the side that has room for it
        place = f'x="{x(step):.1f}" y="{top}" text-anchor="{"end" if end else "start"}"'
        whose = f"{escape(line.label)}: " if line.label else ""
        yield f'<text class="badname" {place}>{whose}{number(value)} from step {step}</text>'

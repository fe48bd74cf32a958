"""Gradient flow as frames over time: which frames are shown, on which axis, and the drawings that are made of characters."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from sonde.errors import SondeError
from sonde.rules.words import number
from sonde.views.axis import Axis, curve_axis, linear_axis
from sonde.views.printable import printable

if TYPE_CHECKING:
    from rich.text import Text

SHADES = " ░▒▓█"
NOTHING = "(no gradient frames recorded)"
STATES = ("normal", "vanishing", "exploding", "not finite")
SHORTEST = 0.02  # of the axis: a small norm is a short bar, no bar is zero
_STYLES = dict(zip(STATES, ("cyan", "yellow", "red", "bold red")))


class Layer(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def mean_abs_grad(self) -> float: ...
    @property
    def max_abs_grad(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def is_vanishing(self) -> bool: ...
    @property
    def is_exploding(self) -> bool: ...
    @property
    def flow_intensity(self) -> float: ...


class FlowFrame(Protocol):
    @property
    def step(self) -> int: ...
    @property
    def layers(self) -> Sequence[Layer]: ...


def layer_names(frames: Sequence[FlowFrame]) -> list[str]:
    return sorted({layer.name for frame in frames for layer in frame.layers})


def by_depth(names: Sequence[str]) -> list[str]:
    """Names with numbers in them by number: `layers.2` before `layers.10`, which most often is the depth."""
    return sorted(names, key=lambda name: [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)])


def state(layer: Layer) -> str:
    """One of `STATES`: the worst that is true."""
    if not math.isfinite(layer.grad_norm):
        return "not finite"
    return "exploding" if layer.is_exploding else "vanishing" if layer.is_vanishing else "normal"


def thinned(frames: Sequence[FlowFrame], limit: int) -> list[FlowFrame]:
    """At most `limit` frames. Of neighbours that must share a place the worst is shown: no explosion is lost."""
    if len(frames) <= limit:
        return list(frames)
    edges = [round(i * len(frames) / limit) for i in range(limit + 1)]
    return [max(frames[start:end], key=_badness) for start, end in pairwise(edges)]


def _badness(frame: FlowFrame) -> int:
    return max((STATES.index(state(layer)) for layer in frame.layers), default=0)


def norm_axis(frames: Sequence[FlowFrame]) -> Axis:
    """One axis for the norms of all frames, so that a bar means the same in each of them."""
    norms = np.array([layer.grad_norm for frame in frames for layer in frame.layers], np.float64)
    axis = curve_axis(norms)
    return linear_axis(0.0, axis.high) if axis.scale == "linear" else axis


def share(layer: Layer, axis: Axis) -> float:
    """The length of a layer's bar, 0 to 1; the whole axis where the norm is not finite."""
    if not math.isfinite(layer.grad_norm):
        return 1.0
    if layer.grad_norm == 0:
        return 0.0
    return min(max(axis.place(np.array([layer.grad_norm])).item(), SHORTEST), 1.0)


def check_fps(fps: float) -> float:
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
        raise SondeError(f"fps={fps!r}: frames per second must be a number above 0, for instance fps=10.")
    return float(fps)


def ascii_animation(frames: Sequence[FlowFrame]) -> str:
    """One row per layer, one column per frame; a layer that is missing in a frame is blank there."""
    if not frames:
        return NOTHING
    from rich.cells import cell_len

    names = layer_names(frames)
    width = max((cell_len(printable(name)) for name in names), default=0)
    columns = [{layer.name: SHADES[_nearest(layer.flow_intensity)] for layer in frame.layers} for frame in frames]
    digits = "".join(str(index % 10) for index in range(len(frames)))
    lines = [f"{'':{width}} │ {digits}", f"{'─' * width}─┼─{'─' * len(frames)}"]
    for name in names:
        shown = printable(name)
        cells = "".join(column.get(name, " ") for column in columns)
        lines.append(f"{' ' * (width - cell_len(shown))}{shown} │ {cells}")
    return "\n".join(lines)


def _nearest(intensity: float) -> int:
    return math.floor(intensity * (len(SHADES) - 1) + 0.5)


def play(frames: Sequence[FlowFrame], fps: float) -> None:
    """FlowFrame after frame in the same place of the terminal; the whole animation at once where there is no terminal."""
    pause_s = 1 / check_fps(fps)
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    if not frames or not console.is_terminal:
        # Not wrapped by rich: a column per frame is one line per layer, however long.
        console.file.write(ascii_animation(frames) + "\n")
        return
    axis = norm_axis(frames)
    names = by_depth(layer_names(frames))
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for index, frame in enumerate(frames):
            live.update(Text("\n").join(terminal_frame(frame, names, axis, console.width, console.height - 1)), refresh=True)
            if index < len(frames) - 1:
                time.sleep(pause_s)


def terminal_frame(frame: FlowFrame, names: Sequence[str], axis: Axis, width: int, height: int) -> list[Text]:
    """One frame as lines: a bar and a norm for each layer. Where there is no room for all layers, the worst are shown."""
    from rich.text import Text

    from sonde.views.lines import line

    by_name = {layer.name: layer for layer in frame.layers}
    room = max(height - 2, 1)
    if len(names) > room:
        worst = sorted(names, key=lambda name: -STATES.index(state(by_name[name])) if name in by_name else 1)[: room - 1]
        shown, num_hidden = by_depth(worst), len(names) - len(worst)
    else:
        shown, num_hidden = list(names), 0
    margin = min(max((Text(printable(name)).cell_len for name in shown), default=0), width // 2)
    longest = max(width - margin - 12, 4)
    lines = [line((f"step {frame.step}", "bold"), (f"   gradient norm, {axis.scale} scale", "dim"))]
    for name in shown:
        label = line(name)
        label.truncate(margin, overflow="ellipsis")
        label.pad_left(margin - label.cell_len)
        layer = by_name.get(name)
        if layer is not None:
            style = _STYLES[state(layer)]
            bar = round(share(layer, axis) * longest)
            label.append_text(line(" ", ("█" * bar, style), f" {number(layer.grad_norm)}"))
        lines.append(label)
    if num_hidden:
        lines.append(line((f"… and {num_hidden} more layers", "dim")))
    return lines

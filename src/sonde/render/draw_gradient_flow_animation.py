"""Gradient flow over time as an animation: characters, frames in a terminal, a GIF, or an HTML page with a slider."""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from sonde.errors import SondeError
from sonde.formatting import number, printable, shorten
from sonde.render.axis_ticks import Axis, curve_axis, linear_axis
from sonde.render.html.html_page import html_lines, html_page, json_script, resource
from sonde.render.plots import style

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from rich.text import Text

    from sonde.tools.gradients.gradient_flow_analysis import GradientFrame, LayerGradientInfo

TITLE = "Gradient flow"
SHADES = " ░▒▓█"
NOT_FINITE = "✗"  # in the place of a shade or a bar: a full one would look like the largest norm
NO_FRAMES = "(no gradient frames recorded)"
STATES = ("normal", "vanishing", "exploding", "not finite")
SHORTEST = 0.02  # of the axis: a small norm is a short bar; only zero has no bar
TERMINAL_STYLES = dict(zip(STATES, ("cyan", "yellow", "red", "bold red")))

MAX_CELLS = 200_000  # layers times frames of a page: above it the page would be slow to open
MAX_GIF_FRAMES = 300
WIDTH, MARGIN = 760, 12  # pixels of the GIF, as all below
TOP, BOTTOM = 42, 44  # for the title, and for axis and legend
NAMES, NUMBERS = 230, 66  # for the names on the left and the norms on the right
ROW, LOWEST_ROW, TALLEST = 18, 2, 760  # of a row, and of all rows together where that is possible
LOWEST_HATCHED = 6  # of a bar
LABEL = 13  # that a name needs
COLORS = dict(zip(STATES, (style.BLUE, style.ORANGE, style.VERMILION, style.BAD)))


def layer_names(frames: Sequence[GradientFrame]) -> list[str]:
    return sorted({layer.name for frame in frames for layer in frame.layers})


def by_depth(names: Sequence[str]) -> list[str]:
    """Names with numbers in them by number: `layers.2` before `layers.10`, which most often is the depth."""
    return sorted(names, key=lambda name: [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)])


def gradient_state(layer: LayerGradientInfo) -> str:
    """One of `STATES`: the worst that is true."""
    if not math.isfinite(layer.grad_norm):
        return "not finite"
    return "exploding" if layer.is_exploding else "vanishing" if layer.is_vanishing else "normal"


def thin_frames(frames: Sequence[GradientFrame], limit: int) -> list[GradientFrame]:
    """At most `limit` frames: of each group of neighbors the worst, so that no explosion is lost."""
    if len(frames) <= limit:
        return list(frames)
    def badness(frame: GradientFrame) -> int:
        return max((STATES.index(gradient_state(layer)) for layer in frame.layers), default=0)

    edges = [round(i * len(frames) / limit) for i in range(limit + 1)]
    return [max(frames[start:end], key=badness) for start, end in pairwise(edges)]


def norm_axis(frames: Sequence[GradientFrame]) -> Axis:
    """One axis for the norms of all frames, so that a bar means the same in each of them."""
    norms = np.array([layer.grad_norm for frame in frames for layer in frame.layers], np.float64)
    axis = curve_axis(norms)
    return linear_axis(0.0, axis.high) if axis.scale == "linear" else axis


def bar_length(layer: LayerGradientInfo, axis: Axis) -> float:
    """The length of a layer's bar, 0 to 1; the whole axis where the norm is not finite."""
    if layer.grad_norm == 0 or not math.isfinite(layer.grad_norm):
        return 1.0 if layer.grad_norm else 0.0
    return min(max(axis.place(np.array([layer.grad_norm])).item(), SHORTEST), 1.0)


def _checked_fps(fps: float) -> float:
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
        raise SondeError(f"fps={fps!r}: frames per second must be a number above 0, for instance fps=10.")
    return float(fps)


def ascii_animation(frames: Sequence[GradientFrame]) -> str:
    """One row per layer, one column per frame; a layer that is missing in a frame is blank there. NaN and Inf have a mark of their own."""
    if not frames:
        return NO_FRAMES
    from rich.cells import cell_len

    names = layer_names(frames)
    width = max((cell_len(printable(name)) for name in names), default=0)
    darkest = len(SHADES) - 1

    def shade(layer: LayerGradientInfo) -> str:
        return SHADES[math.floor(layer.flow_intensity * darkest + 0.5)] if math.isfinite(layer.grad_norm) else NOT_FINITE

    columns = [{layer.name: shade(layer) for layer in frame.layers} for frame in frames]
    digits = "".join(str(index % 10) for index in range(len(frames)))
    lines = [f"{'':{width}} │ {digits}", f"{'─' * width}─┼─{'─' * len(frames)}"]
    for name in names:
        shown = printable(name)
        cells = "".join(column.get(name, " ") for column in columns)
        lines.append(f"{' ' * (width - cell_len(shown))}{shown} │ {cells}")
    return "\n".join(lines)


def play(frames: Sequence[GradientFrame], fps: float) -> None:
    """Frame after frame in the same place of the terminal; the whole animation at once where there is no terminal."""
    pause_s = 1 / _checked_fps(fps)
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    if not frames or not console.is_terminal:
        # Not wrapped by rich: a column per frame is one line per layer, however long.
        explained = f"{TITLE}: norm of each layer over the largest of its frame, from none to {SHADES[-1]}; {NOT_FINITE} is NaN or Inf\n"
        console.file.write(f"{explained if frames else ''}{ascii_animation(frames)}\n")
        return
    axis = norm_axis(frames)
    names = by_depth(layer_names(frames))
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for index, frame in enumerate(frames):
            live.update(Text("\n").join(terminal_frame(frame, names, axis, console.width, console.height - 1)), refresh=True)
            if index < len(frames) - 1:
                time.sleep(pause_s)


def terminal_frame(frame: GradientFrame, names: Sequence[str], axis: Axis, width: int, height: int) -> list[Text]:
    """One frame as lines: a title, a heading, and a bar and a norm for each layer. Where there is no room for all layers, the worst are
    shown."""
    from rich.text import Text

    from sonde.render.terminal.print_to_terminal import line

    by_name = {layer.name: layer for layer in frame.layers}
    room = max(height - 3, 1)
    shown = list(names)
    if len(names) > room:
        shown = by_depth(sorted(names, key=lambda name: -STATES.index(gradient_state(by_name[name])) if name in by_name else 1)[: room - 1])
    margin = min(max((Text(printable(name)).cell_len for name in ("layer", *shown)), default=0), width // 2)
    longest = max(width - margin - 12, 4)
    heading = line((f"{'layer':>{margin}} gradient norm ({axis.scale} scale)", "dim"))
    heading.truncate(width, overflow="ellipsis")
    lines = [line((f"{TITLE}, step {frame.step}", "bold")), heading]
    for name in shown:
        label = line(name)
        label.truncate(margin, overflow="ellipsis")
        label.pad_left(margin - label.cell_len)
        layer = by_name.get(name)
        if layer is not None:
            bar = "█" * round(bar_length(layer, axis) * longest) if math.isfinite(layer.grad_norm) else NOT_FINITE
            label.append_text(line(" ", (bar, TERMINAL_STYLES[gradient_state(layer)]), f" {number(layer.grad_norm)}"))
        lines.append(label)
    if len(shown) < len(names):
        lines.append(line((f"… and {len(names) - len(shown)} more layers", "dim")))
    return lines


def animation_html(frames: Sequence[GradientFrame]) -> str:
    """A page with a slider. Where no script runs (a mail client, say), it shows the animation in characters instead."""
    title = TITLE
    if not any(frame.layers for frame in frames):
        return html_page(title, f'<h1>{title}</h1><p class="story">{NO_FRAMES}</p>')
    names = by_depth(layer_names(frames))
    shown = thin_frames(frames, max(MAX_CELLS // len(names), 2))
    axis = norm_axis(shown)
    # The script only puts numbers, lengths and texts in their places: all of them are computed here.
    data = {
        "layers": [printable(name) for name in names],
        "frames": [{"step": frame.step, "cells": _html_cells(frame, names, axis)} for frame in shown],
    }
    steps = f"{len(shown)} of {len(frames)} frames, the worst of each group" if len(shown) < len(frames) else f"{len(frames)} frames"
    legend = "".join(f'<span class="{each.replace("not finite", "nonfinite")}"><i></i>{each}</span>' for each in STATES)
    head = "".join(f"<th>{each}</th>" for each in ("layer", "", "norm", "mean |g|", "max |g|"))
    body = (
        f'<style>{resource("gradient_flow.css")}</style><h1>{title}</h1>'
        f'<p class="story">{len(names)} layers, {steps}, steps {shown[0].step} to {shown[-1].step}. '
        f"Bars show the L2 norm of each gradient on one {axis.scale} axis.</p>"
        '<div class="flow"><div class="row"><button id="play" type="button">Play</button>'
        f'<input id="scrubber" type="range" min="0" max="{len(shown) - 1}" value="0" aria-label="frame"><output id="where"></output></div>'
        '<canvas id="map" role="img" aria-label="all frames, one row per layer; above them a mark where a layer explodes"></canvas>'
        f'<div class="legend">{legend}</div></div>'
        f'<div class="table"><table class="bars"><thead><tr>{head}</tr></thead><tbody id="bars"></tbody></table></div>'
        f"<noscript><pre>{html_lines(ascii_animation(shown))}</pre></noscript>"
        f"{json_script('frames', data)}"
    )
    return html_page(title, body, script=resource("gradient_flow.js"))


def _html_cells(frame: GradientFrame, names: Sequence[str], axis: Axis) -> list[list[object] | None]:
    cells: dict[str, list[object]] = {}
    for layer in frame.layers:
        texts = [number(each) for each in (layer.grad_norm, layer.mean_abs_grad, layer.max_abs_grad)]
        cells[layer.name] = [round(bar_length(layer, axis), 4), STATES.index(gradient_state(layer)), *texts]
    return [cells.get(name) for name in names]


def animation_gif(frames: Sequence[GradientFrame], fps: float) -> bytes:
    """One bar per layer on one axis. Of more than `MAX_GIF_FRAMES` frames the worst of each group of neighbors is shown."""
    milliseconds = max(round(1000 / _checked_fps(fps)), 20)  # browsers slow down what is faster
    if not any(frame.layers for frame in frames):
        raise SondeError(f"There is nothing to animate {NO_FRAMES}. Call record_step(step, gradients) or record_model(step, model) first.")
    shown = thin_frames(frames, MAX_GIF_FRAMES)
    painter = _FramePainter(by_depth(layer_names(shown)), norm_axis(shown))
    images = [painter.draw(frame) for frame in shown]
    file = io.BytesIO()
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=milliseconds, loop=0, optimize=True)
    return file.getvalue()


class _FramePainter:
    """Draws frames with Pillow; rows, axis and fonts are the same in all of them."""

    def __init__(self, names: Sequence[str], axis: Axis) -> None:
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError:
            raise SondeError("GIFs are drawn by Pillow, which is not installed.\nInstall it with: pip install 'sonde[plot]'") from None
        self._image, self._pen = Image.new, ImageDraw.Draw
        self.small, self.large = ImageFont.load_default(11), ImageFont.load_default(15)
        self.names, self.axis = names, axis
        self.row = min(max(TALLEST // len(names), LOWEST_ROW), ROW)
        self.stride = max(-(-LABEL // self.row), 1)  # every so many rows there is room for a name
        self.height = TOP + self.row * len(names) + BOTTOM
        self.left, self.right = MARGIN + NAMES, WIDTH - MARGIN - NUMBERS
        pen = self._pen(self._image("RGB", (1, 1)))
        self.labels = {index: self._fitted(pen, names[index]) for index in range(0, len(names), self.stride)}

    def draw(self, frame: GradientFrame) -> Image:
        image = self._image("RGB", (WIDTH, self.height), style.BACKGROUND)
        pen = self._pen(image)
        pen.text((MARGIN, 10), f"Gradient norm by layer, step {frame.step}", style.TEXT, self.large)
        self._axis(pen)
        by_name = {layer.name: layer for layer in frame.layers}
        gap = 2 if self.row >= 8 else 1 if self.row > 3 else 0
        for index, name in enumerate(self.names):
            top = TOP + index * self.row
            layer = by_name.get(name)
            label = self.labels.get(index)
            if label is not None:
                self._text(pen, self.left - 8, top + self.row / 2, label, "rm")
            if layer is None:
                continue
            end = self.left + bar_length(layer, self.axis) * (self.right - self.left)
            if end > self.left:
                self._bar(pen, (self.left, top + gap, end, top + self.row - 1 - gap), gradient_state(layer))
            if label is not None:
                self._text(pen, WIDTH - MARGIN, top + self.row / 2, number(layer.grad_norm), "rm")
        return image

    def _bar(self, pen: ImageDraw, box: tuple[float, float, float, float], state: str) -> None:
        left, top, right, bottom = box
        if state != "not finite" or bottom - top < LOWEST_HATCHED:
            pen.rectangle(box, COLORS[state])
            return
        # Hatched: a filled bar over the whole axis would look like the largest norm.
        pen.rectangle(box, style.BACKGROUND, COLORS[state])
        high = bottom - top
        for x in np.arange(left, right - high, 2 * high / 3).tolist():
            pen.line((x, bottom, x + high, top), COLORS[state])

    def _axis(self, pen: ImageDraw) -> None:
        bottom = TOP + self.row * len(self.names)
        for place, label in self.axis.ticks(6):
            x = self.left + place * (self.right - self.left)
            pen.line((x, TOP, x, bottom), style.GRID)
            self._text(pen, x, bottom + 10, label, "mm")
        x = float(self.left)
        for each, color in COLORS.items():
            pen.rectangle((x, bottom + 24, x + 10, bottom + 34), color)
            self._text(pen, x + 15, bottom + 29, each, "lm")
            x += 35 + pen.textlength(each, self.small)

    def _fitted(self, pen: ImageDraw, name: str) -> str:
        # The font knows Latin letters only; what it does not know is written out, as in a terminal that cannot show it.
        text = printable(name).encode("latin-1", "backslashreplace").decode("latin-1")
        shown, limit = text, len(text)
        while limit > 4 and pen.textlength(shown, self.small) > NAMES - 8:
            limit -= 1
            shown = shorten(text, limit).replace("…", "..")
        return shown

    def _text(self, pen: ImageDraw, x: float, y: float, text: str, anchor: str) -> None:
        pen.text((x, y), text, style.GRAY, self.small, anchor=anchor)

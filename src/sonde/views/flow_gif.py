"""Gradient flow as a GIF: one bar per layer on one axis, frame after frame. Drawn by Pillow, which is loaded when it is needed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sonde.errors import SondeError
from sonde.rules.words import number
from sonde.views.axis import Axis
from sonde.views.flow_animation import NOTHING, STATES, FlowFrame, by_depth, check_fps, layer_names, norm_axis, share, state, thinned
from sonde.views.plots import ink
from sonde.views.printable import printable

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

MAX_FRAMES = 300
WIDTH, MARGIN = 760, 12
TOP, BOTTOM = 42, 44  # pixels for the title, and for axis and legend
NAMES, NUMBERS = 230, 66  # pixels for the names on the left and the norms on the right
ROW, LOWEST_ROW, TALLEST = 18, 2, 760  # pixels of a row, and of all rows together where that is possible
LABEL = 13  # pixels that a name needs
COLOURS = dict(zip(STATES, (ink.BLUE, ink.ORANGE, ink.VERMILION, ink.BAD)))


def gif(frames: Sequence[FlowFrame], fps: float) -> bytes:
    """The animation. Of more than `MAX_FRAMES` frames the worst of each group of neighbours is shown."""
    milliseconds = max(round(1000 / check_fps(fps)), 20)  # browsers slow down what is faster
    if not any(frame.layers for frame in frames):
        raise SondeError(f"There is nothing to animate {NOTHING}. Call record_step(step, gradients) or record_model(step, model) first.")
    shown = thinned(frames, MAX_FRAMES)
    sheet = _Sheet(by_depth(layer_names(shown)), norm_axis(shown))
    images = [sheet.draw(frame) for frame in shown]
    file = io.BytesIO()
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=milliseconds, loop=0, optimize=True)
    return file.getvalue()


class _Sheet:
    """What all frames have in common: the rows, the axis, the type."""

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

    def draw(self, frame: FlowFrame) -> Image:
        image = self._image("RGB", (WIDTH, self.height), ink.PAPER)
        pen = self._pen(image)
        pen.text((MARGIN, 10), f"Gradient norm by layer, step {frame.step}", ink.INK, self.large)
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
            end = self.left + share(layer, self.axis) * (self.right - self.left)
            if end > self.left:
                pen.rectangle((self.left, top + gap, end, top + self.row - 1 - gap), COLOURS[state(layer)])
            if label is not None:
                self._text(pen, WIDTH - MARGIN, top + self.row / 2, number(layer.grad_norm), "rm")
        return image

    def _axis(self, pen: ImageDraw) -> None:
        bottom = TOP + self.row * len(self.names)
        for place, label in self.axis.ticks(6):
            x = self.left + place * (self.right - self.left)
            pen.line((x, TOP, x, bottom), ink.LINE)
            self._text(pen, x, bottom + 10, label, "mm")
        x = float(self.left)
        for each, colour in COLOURS.items():
            pen.rectangle((x, bottom + 24, x + 10, bottom + 34), colour)
            self._text(pen, x + 15, bottom + 29, each, "lm")
            x += 35 + pen.textlength(each, self.small)

    def _fitted(self, pen: ImageDraw, name: str) -> str:
        # The font knows Latin letters only; what it does not know is written out, as in a terminal that cannot show it.
        text = printable(name).encode("latin-1", "backslashreplace").decode("latin-1")
        limit = len(text)
        while limit > 4 and pen.textlength(_plain(ink.elided(text, limit)), self.small) > NAMES - 8:
            limit -= 1
        return _plain(ink.elided(text, limit))

    def _text(self, pen: ImageDraw, x: float, y: float, text: str, anchor: str) -> None:
        pen.text((x, y), text, ink.SOFT, self.small, anchor=anchor)


def _plain(text: str) -> str:
    return text.replace("…", "..")

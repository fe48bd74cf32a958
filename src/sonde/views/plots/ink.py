"""How every picture looks: colours, type, frames, captions. matplotlib is loaded here, when something is drawn, and left as it was.

Figures are made without pyplot, so that no window, no backend and no setting of the user's is touched; the settings that
matplotlib takes from nowhere but its global table hold only while a picture is drawn.
"""

from __future__ import annotations

import functools
import re
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sonde.errors import SondeError
from sonde.views.axis import Axis
from sonde.views.printable import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, LINE, PAPER = "#1d1f24", "#626873", "#e3e1db", "#ffffff"
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, YELLOW = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442"
LINES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)  # Okabe and Ito: told apart with every kind of colour vision
BAD = "#d0021b"  # what is not finite; always with a shape of its own as well, for those who see no red
SEQUENTIAL, DIVERGING = "viridis", "PuOr_r"
SMALL, TINY = 8.0, 6.0  # points

# Beside DejaVu, which comes with matplotlib: fonts that know more scripts, where they are installed.
MORE_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Malgun Gothic", "Noto Sans")
SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched, read aloud, edited
    "pdf.fonttype": 42,  # journals refuse Type 3 fonts
    "font.size": SMALL,
    "text.color": INK,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "hatch.linewidth": 0.6,
}
_one_at_a_time = threading.RLock()  # the table of settings is one for all threads


@contextmanager
def house_style(salt: str = "") -> Iterator[None]:
    """matplotlib with its defaults and ours, whatever the user has set; afterwards everything is as before."""
    try:
        import matplotlib
    except ImportError:
        raise SondeError("Pictures are drawn by matplotlib, which is not installed.\nInstall it with: pip install 'sonde[plot]'") from None
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    families = ["DejaVu Sans", *(name for name in MORE_FONTS if name in installed)]
    with _one_at_a_time, matplotlib.rc_context():
        matplotlib.rcdefaults()
        # The salt makes the names inside an SVG the same each time, and different in two pictures on one page.
        settings: Any = SETTINGS | {"font.family": families, "svg.hashsalt": f"sonde {printable(salt)}"}
        matplotlib.rcParams.update(settings)
        yield


def empty_figure(size: tuple[float, float]) -> Figure:
    """A figure of `size` inches that belongs to no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    _layout(figure).set(w_pad=0.06, h_pad=0.06, wspace=0.02, hspace=0.02)
    return figure


def safe(text: object, limit: int = 120) -> str:
    """Text of the user's for a picture: no control characters, nothing that no installed font can draw, not endless."""
    string = elided(printable(text), limit)
    if string.isascii():
        return string
    from matplotlib import rcParams

    known = _known(tuple(rcParams["font.family"]))
    return "".join(char if ord(char) in known else char.encode("ascii", "backslashreplace").decode() for char in string)


@functools.cache
def _known(families: tuple[str, ...]) -> frozenset[int]:
    """The characters that these fonts can draw."""
    from matplotlib.font_manager import FontProperties, fontManager, get_font

    fonts = [get_font(fontManager.findfont(FontProperties(family=[name]))) for name in families]
    return frozenset().union(*(font.get_charmap() for font in fonts))


def elided(text: str, limit: int) -> str:
    """The beginning and the end of a long text: in `encoder.layers.11…attention.query` both tell where it is."""
    if len(text) <= limit:
        return text
    head = (limit - 1) // 3
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head):]}"


def heading(figure: Figure, title: str, notes: str = "", warning: str = "") -> None:
    """The title, facts below it, and in red what is not a number. The axes get the room that is left."""
    wide, high = figure.get_size_inches()
    rows = [(safe(title, int(wide * 11)), 10.0, INK, "bold")]
    for text, colour in ((notes, SOFT), (warning, BAD)):
        rows.extend((row, 7.0, colour, "normal") for row in textwrap.wrap(safe(text, 400), int(wide * 16)))
    top = 0.07
    for text, points, colour, weight in rows:
        place = (0.08 / wide, 1 - top / high)
        figure.text(*place, text, ha="left", va="top", fontsize=points, color=colour, fontweight=weight, parse_math=False)
        top += points * 1.45 / 72
    _layout(figure).set(rect=(0, 0, 1, max(1 - top / high, 0.2)))


def draw_axis(axes: Axes, which: str, axis: Axis, label: str, *, limit: int = 6, whole: bool = False) -> None:
    """Ticks and a label for an axis whose positions are shares; `whole` is for values of which none lies between two numbers."""
    ticks = axis.ticks(limit)
    if whole:
        ticks = [(place, f"{float(text):g}") for place, text in ticks if float(text).is_integer()]
    target = axes.xaxis if which == "x" else axes.yaxis
    target.set_ticks([place for place, _ in ticks], labels=[typeset(text) for _, text in ticks])
    target.set_label_text(safe(label), parse_math=False)
    (axes.set_xlim if which == "x" else axes.set_ylim)(-0.01, 1.01)


def grid(axes: Axes, which: Any = "both") -> None:
    axes.set_axisbelow(True)
    axes.grid(True, axis=which, color=LINE, linewidth=0.5)


def say(axes: Axes, text: str) -> None:
    """Words in the place of a drawing that there is nothing for."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=10, color=SOFT, parse_math=False)


def _layout(figure: Figure) -> Any:
    """The engine that keeps labels and axes from overlapping; its settings are not in matplotlib's types."""
    return figure.get_layout_engine()


def typeset(label: str) -> str:
    """`1e-5` as ten to the minus five."""
    power = re.fullmatch(r"(-?)(\d[\d.]*)e(-?\d+)", label)
    if not power:
        return label.replace("-", "−")
    sign, digits, exponent = power.groups()
    factor = "" if digits == "1" else rf"{digits}\times "
    return rf"${'-' if sign else ''}{factor}10^{{{exponent}}}$"

"""The style of all plots: colors, fonts, axes, captions, legends. matplotlib is imported when something is drawn.

Figures are made without pyplot, so that no window, backend or setting of the user changes; rcParams change only while a plot is drawn.
"""

from __future__ import annotations

import functools
import re
import textwrap
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sonde.errors import SondeError
from sonde.formatting import printable, shorten
from sonde.render.axis_ticks import Axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

TEXT, GRAY, GRID, BACKGROUND = "#1d1f24", "#626873", "#e3e1db", "#ffffff"
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, YELLOW = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442"
LINE_COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)  # of Okabe and Ito: different for every kind of color vision
BAD = "#d0021b"  # non-finite values; always with their own shape too, for those who see no red
SEQUENTIAL, DIVERGING = "viridis", "PuOr_r"
SMALL, TINY = 8.0, 6.0  # points

# Beside DejaVu, which comes with matplotlib: fonts that know more scripts, where they are installed.
MORE_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Malgun Gothic", "Noto Sans")
SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched, read aloud, edited
    "pdf.fonttype": 42,  # journals refuse Type 3 fonts
    "font.size": SMALL, "text.color": TEXT, "hatch.linewidth": 0.6,
    "axes.edgecolor": GRAY, "axes.labelcolor": TEXT, "axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False,
    "xtick.color": GRAY, "xtick.labelcolor": TEXT, "xtick.major.width": 0.6, "xtick.major.size": 3,
    "ytick.color": GRAY, "ytick.labelcolor": TEXT, "ytick.major.width": 0.6, "ytick.major.size": 3,
}  # fmt: skip
_one_at_a_time = threading.RLock()  # the table of settings is one for all threads


@contextmanager
def plot_style(salt: str = "") -> Iterator[None]:
    """matplotlib with its defaults and these settings, whatever the user has set; afterwards the settings are as before."""
    try:
        import matplotlib
    except ImportError:
        raise SondeError("Pictures are drawn by matplotlib, which is not installed.\nInstall it with: pip install 'sonde[plot]'") from None
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    families = ["DejaVu Sans", *(name for name in MORE_FONTS if name in installed)]
    with _one_at_a_time, matplotlib.rc_context():
        matplotlib.rcdefaults()
        # The salt makes the names inside an SVG the same each time, and different in two plots on one page.
        settings: Any = SETTINGS | {"font.family": families, "svg.hashsalt": f"sonde {printable(salt)}"}
        matplotlib.rcParams.update(settings)
        yield


def empty_figure(size: tuple[float, float]) -> Figure:
    """A figure of `size` inches that belongs to no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", facecolor=BACKGROUND)
    FigureCanvasAgg(figure)
    layout: Any = figure.get_layout_engine()  # its settings are not in matplotlib's types
    layout.set(w_pad=0.06, h_pad=0.06, wspace=0.02, hspace=0.02)
    return figure


def safe_text(text: object, limit: int = 120) -> str:
    """Untrusted text for a plot: no control characters, only characters that an installed font has, at most `limit` of them."""
    string = shorten(printable(text), limit)
    if string.isascii():
        return string
    from matplotlib import rcParams

    known = _known(tuple(rcParams["font.family"]))
    return "".join(char if ord(char) in known else char.encode("ascii", "backslashreplace").decode() for char in string)


@functools.cache
def _known(families: tuple[str, ...]) -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, fontManager, get_font

    fonts = [get_font(fontManager.findfont(FontProperties(family=[name]))) for name in families]
    return frozenset().union(*(font.get_charmap() for font in fonts))


def heading(figure: Figure, title: str, notes: str = "", warning: str = "") -> None:
    """The title, notes below it, and a warning in red. The axes get the room that is left."""
    wide, high = figure.get_size_inches()
    rows = [(safe_text(title, int(wide * 11)), 10.0, TEXT, "bold")]
    for text, color in ((notes, GRAY), (warning, BAD)):
        rows.extend((row, 7.0, color, "normal") for row in textwrap.wrap(safe_text(text, 400), int(wide * 16)))
    top = 0.07
    for text, points, color, weight in rows:
        place = (0.08 / wide, 1 - top / high)
        figure.text(*place, text, ha="left", va="top", fontsize=points, color=color, fontweight=weight, parse_math=False)
        top += points * 1.45 / 72
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(0, 0, 1, max(1 - top / high, 0.2)))


def draw_axis(axes: Axes, which: str, axis: Axis, label: str, *, limit: int = 6, whole: bool = False) -> None:
    """Ticks and a label for an axis whose positions are shares; `whole` is for values of which none lies between two numbers."""
    ticks = axis.ticks(limit)
    if whole:
        ticks = [(place, f"{float(text):.0f}" if abs(float(text)) < 1e5 else text) for place, text in ticks if float(text).is_integer()]
    target = axes.xaxis if which == "x" else axes.yaxis
    target.set_ticks([place for place, _ in ticks], labels=[typeset(text) for _, text in ticks])
    target.set_label_text(safe_text(label), parse_math=False)
    (axes.set_xlim if which == "x" else axes.set_ylim)(-0.01, 1.01)


def grid(axes: Axes, which: Any = "both") -> None:
    axes.set_axisbelow(True)
    axes.grid(True, axis=which, color=GRID, linewidth=0.5)


def show_message(axes: Axes, text: str) -> None:
    """Text in the middle of axes that have nothing to show."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=10, color=GRAY, parse_math=False)


def whole_number_ticks(num: int) -> Any:
    """A locator for at most about `num` ticks at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=num, integer=True)


def legend_beside(axes: Axes, *, reverse: bool = False) -> None:
    """The legend to the right of the axes."""
    handles, labels = axes.get_legend_handles_labels()
    if reverse:
        handles, labels = handles[::-1], labels[::-1]
    legend = axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=7, borderaxespad=0)
    without_math(legend.get_texts())


def without_math(texts: Iterable[Text]) -> None:
    """Names with a dollar sign are not formulas."""
    for text in texts:
        text.set_parse_math(False)


def typeset(label: str) -> str:
    """`1e-5` as ten to the minus five."""
    power = re.fullmatch(r"(-?)(\d[\d.]*)e(-?\d+)", label)
    if not power:
        return label.replace("-", "−")
    sign, digits, exponent = power.groups()
    factor = "" if digits == "1" else rf"{digits}\times "
    return rf"${'-' if sign else ''}{factor}10^{{{exponent}}}$"

"""A curve or a bar in one line of text. Non-finite values have marks of their own."""

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
MARKS, ASCII_MARKS = {"nan": "✗", "inf": "↑", "-inf": "↓"}, {"nan": "N", "inf": "^", "-inf": "v"}
LOG_FROM = 100.0  # a curve that spans more than two decades would be one step and a flat line on a linear axis


def sparkline(values: Sequence[float], width: int = 48, *, ascii_only: bool = False) -> str:
    """One character for each value, or for each group of neighbours where there are more values than `width`."""
    columns = _columns(values, max(width, 1))
    logarithmic = is_log(columns)
    heights = [math.log10(value) if logarithmic and math.isfinite(value) else value for value in columns]
    finite = [height for height in heights if math.isfinite(height)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    blocks, marks = (ASCII_BLOCKS, ASCII_MARKS) if ascii_only else (BLOCKS, MARKS)
    return "".join(_block(height, low, high, blocks) if math.isfinite(height) else marks[str(float(height))] for height in heights)


def histogram_line(counts: Sequence[float], width: int = 48, *, logarithmic: bool = False) -> str:
    """The bars of a histogram in one line, from zero on: an empty bin is blank, a filled one is visible. With more bins than `width`,
    neighbours are added up. `logarithmic` is for a bar that would hide the others."""
    num = -(-len(counts) // max(width, 1)) or 1  # bins per character, the same for each
    counts = [sum(counts[start : start + num]) for start in range(0, len(counts), num)]
    heights = [math.log10(1 + count) if logarithmic else count for count in counts]
    highest = max(heights, default=0.0)
    return "".join(BLOCKS[max(math.ceil(height / highest * len(BLOCKS)), 1) - 1] if height > 0 else " " for height in heights)


def bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """A horizontal bar over this share of `width`; a share above zero is always visible."""
    if not share > 0:
        return ""
    if ascii_only:
        return "#" * max(round(min(share, 1.0) * width), 1)
    full, rest = divmod(max(round(min(share, 1.0) * width * 8), 1), 8)
    return "█" * full + EIGHTHS[rest]


def is_log(values: Sequence[float]) -> bool:
    """Whether these values are drawn on a logarithmic axis; non-finite values do not count."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / LOG_FROM > min(finite)


def _columns(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    groups = [values[start:end] for start, end in pairwise(edges)]
    # A non-finite value where there is one, else the maximum: a spike must not disappear.
    return [next((value for value in group if not math.isfinite(value)), max(group)) for group in groups]


def _block(height: float, low: float, high: float, blocks: str) -> str:
    span = high / 2 - low / 2  # halved: the distance of two floats may overflow, half of it cannot
    if span <= 0:
        return blocks[len(blocks) // 2 - 1]
    return blocks[min(int((height / 2 - low / 2) / span * len(blocks)), len(blocks) - 1)]

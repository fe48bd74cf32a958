"""Numbers, counts, units and lists as text, layer names for people, text that is safe to print, and strict JSON.

Every output of Sonde uses these functions, so one value reads the same everywhere.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

DASH = "–"  # in the place of a quantity that was not measured


def number(value: float) -> str:
    """Three significant digits; non-finite values are `NaN`, `Infinity` and `-Infinity`."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    if float(value).is_integer() and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}"


def number_or_text(value: float | str) -> str:
    """Text as it is, a number as `number` writes it."""
    return value if isinstance(value, str) else number(value)


def listing(names: Sequence[str], limit: int = 3) -> str:
    """`a, b, c and 12 more`."""
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def counted(num: int, noun: str) -> str:
    """`1 step`, `1,200 steps`."""
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"


def percent(share: float) -> str:
    """`1.3 %`, `< 0.1 %`; `unknown` where the share is not finite."""
    if not math.isfinite(share):
        return "unknown"
    return "< 0.1 %" if 0 < share < 0.001 else f"{share:.1%}".replace("%", " %")


def whole_percent(share: float) -> str:
    """`34 %`, `<1 %`; a dash where the share is not finite."""
    if not math.isfinite(share):
        return DASH
    return "<1 %" if 0 < share < 0.005 else f"{share:.0%}".replace("%", " %")


def factor(ratio: float) -> str:
    """`1.80x`; a dash where the ratio is not finite."""
    return f"{ratio:.2f}x" if math.isfinite(ratio) else DASH


def rate(per_s: float) -> str:
    """A rate per second: `1,250` or `12.5`; a dash where it is NaN."""
    if per_s != per_s:
        return DASH
    return f"{per_s:,.0f}" if per_s >= 100 else number(per_s)


def milliseconds(ms: float) -> str:
    """`12.3`, `<0.001`; a dash where nothing was measured."""
    if not math.isfinite(ms):
        return DASH if math.isnan(ms) else number(ms)
    if 0 < ms < 0.001:
        return "<0.001"
    digits = next((digits for digits, limit in ((3, 0.0995), (2, 9.995), (1, 99.95)) if abs(ms) < limit), 0)
    return f"{ms:,.{digits}f}" if ms else "0"


def size(num_bytes: float) -> str:
    """`512 bytes`, `3.2 MiB`: in powers of 1024."""
    sign, num_bytes = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{sign}{_three_digits(num_bytes) if unit != 'bytes' else round(num_bytes)} {unit}"
        num_bytes /= 1024
    return f"{sign}{_three_digits(num_bytes)} GiB"


def si_number(value: float, unit: str = "") -> str:
    """`1.26 G`, `640 kB`: in powers of 1000; a dash where the value is not finite."""
    if not math.isfinite(value):
        return DASH
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * scale:
            return f"{_three_places(value / scale)} {letter}{unit}"
    return f"{_three_places(value)} {unit}".rstrip()


def layer_name(path: str, type_: str = "") -> str:
    """A layer for people: a path that is only a number, as in `nn.Sequential`, reads `layer 4 (Linear)`; others stay as they are."""
    if not path.isdecimal():
        return path
    return f"layer {path} ({type_})" if type_ else f"layer {path}"


def shorten(text: str, limit: int) -> str:
    """The beginning and the end of a long text: in `encoder.layers.11…attention.query` both identify the layer."""
    if len(text) <= limit:
        return text
    head = (limit - 1) // 3
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head):]}"


def printable(text: object, *, lines: bool = False) -> str:
    """Untrusted text that is safe to print: every character without a shape is written out, as `\\x1b` or `\\u202e`.

    Names of modules, files and arguments may contain escape sequences, direction marks, lone surrogates or invisible spaces, which a
    terminal would obey or hide. `lines` keeps line breaks.
    """
    string = str(text)
    if string.isprintable():
        return string
    return "".join(char if char.isprintable() or (lines and char == "\n") else _escaped(char) for char in string)


def strict(value: Any) -> Any:
    """The same value for strict JSON: non-finite numbers become strings, and so does what JSON has no type for."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else number(value)
    return str(value)


def strict_json(value: Any) -> str:
    """One strict JSON document, indented."""
    return json.dumps(strict(value), indent=1, allow_nan=False)


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _three_places(value: float) -> str:
    """Three digits, also where the last of them are zeros."""
    if abs(value) >= 99.95 or float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def _escaped(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

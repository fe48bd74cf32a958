"""How two numbers stand beside each other in a sentence."""

from __future__ import annotations

from sonde.formatting import number

MOST_DIGITS = 17  # no two doubles look alike with so many


def apart(a: float, b: float) -> tuple[str, str]:
    """Both as a person would say them, with as many digits as it takes to tell them apart."""
    texts = number(a), number(b)
    digits = 3
    while texts[0] == texts[1] and a != b and not (a != a and b != b) and digits < MOST_DIGITS:
        digits += 1
        texts = f"{a:.{digits}g}", f"{b:.{digits}g}"
    return texts


def times(ratio: float) -> str:
    """`1.8 times`, `2.4 times`: always the larger over the smaller, so that the sentence says which way."""
    return f"{number(max(ratio, 1 / ratio))} times" if ratio > 0 else "many times"


def duration(ms: float) -> str:
    """`9.9 ms`, `1,230 ms`."""
    return f"{float(number(ms)):,.0f} ms" if 1000 <= ms < 1e6 else f"{number(ms)} ms"

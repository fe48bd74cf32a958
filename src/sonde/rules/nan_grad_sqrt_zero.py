"""A square root, or a norm, of zero: the loss is fine and its gradient is not.

What it finds    sqrt(), a power below one, or a norm whose argument is exactly zero for some sample.
Why it matters   the slope at zero is infinite, and times the zero slope of a square it is NaN. The loss of that step looks normal; one
                 update later every weight is NaN.
How it knows     the look back ran the backward again and found that the backward of this operation made the first bad number.
Known problems   none known: a root at zero that does not reach a gradient is not looked at.
Fix              add a small number inside the root: sqrt(x + 1e-12).
"""

from __future__ import annotations

from typing import ClassVar

from sonde.rules.origins import OfAnOrigin


class NanGradSqrtZero(OfAnOrigin):
    name: ClassVar[str] = "nan-grad-sqrt-zero"

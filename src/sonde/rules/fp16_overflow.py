"""A number beyond 65504 in half precision.

What it finds    an operation in float16 whose result does not fit: a matrix product, a sum, an exponential, a cast.
Why it matters   it becomes Inf, and soon NaN. float16 ends at 65504, bfloat16 and float32 at 3e38.
How it knows     the look back found the operation that made the first Inf, and its dtype.
Known problems   steps that a GradScaler skips, as it does while it looks for its scale, are not counted.
Fix              run that part in float32 (autocast(enabled=False)) or in bfloat16, or keep its inputs smaller.
"""

from __future__ import annotations

from typing import ClassVar

from sonde.rules.origins import OfAnOrigin


class Fp16Overflow(OfAnOrigin):
    name: ClassVar[str] = "fp16-overflow"

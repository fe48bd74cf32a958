"""A number beyond 65504 in half precision.

What it finds    an operation in float16 whose result does not fit: a matrix product, a sum, an exponential, a cast.
Why it matters   it becomes Inf, and soon NaN. float16 ends at 65504, bfloat16 and float32 at 3e38.
How it knows     the look back found the operation that made the first Inf, and its dtype.
Known problems   steps that a GradScaler skips, as it does while it looks for its scale, are not counted.
Fix              run that part in float32 (autocast(enabled=False)) or in bfloat16, or keep its inputs smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.record import Step
from sonde.rules.origins import FOLLOWS, KEYS, Origins
from sonde.rules.rule import Answer


@dataclass(slots=True)
class Fp16Overflow:
    name: ClassVar[str] = "fp16-overflow"
    explains: ClassVar[tuple[str, ...]] = FOLLOWS

    origins: Origins = field(default_factory=Origins)

    def see(self, step: Step) -> None:
        self.origins.see(step)

    def answer(self) -> Answer:
        return self.origins.answer(self.name, KEYS[self.name])

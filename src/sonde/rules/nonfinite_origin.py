"""The first NaN or Inf of the training, and the operation that made it.

What it finds    an operation that was given finite numbers and put out a NaN or an Inf, from which the bad loss or gradient follows: a
                 logarithm of zero, a division by an empty count, an exponential that overflows, a softmax over a row that is all masked;
                 or a weight or a batch that was bad before the step began.
Why it matters   everything after it is NaN. The line that made it is rarely the line where the NaN is noticed.
How it knows     when the loss or a gradient is not finite, and before anything has used it, the step is run again with every operation
                 looked at: same inputs, same random numbers, afterwards everything as it was. Halves of the batch are run to find the
                 samples that trigger it.
Known problems   a step that cannot be run again (it reads from a stream, it changes objects of its own) is explained by the model alone
                 or by the graph of the loss; the notes say so. Masks of -Inf that do no harm are not counted. Where the weights had
                 diverged before, lr-divergence comes first.
Fix              what the finding says: it knows the operation and its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.record import Step
from sonde.rules.origins import FOLLOWS, Origins
from sonde.rules.rule import Answer


@dataclass(slots=True)
class NonfiniteOrigin:
    name: ClassVar[str] = "nonfinite-origin"
    explains: ClassVar[tuple[str, ...]] = FOLLOWS

    origins: Origins = field(default_factory=Origins)

    def see(self, step: Step) -> None:
        self.origins.see(step)

    def answer(self) -> Answer:
        return self.origins.answer(self.name)

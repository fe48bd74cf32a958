"""Every label of a batch is ignored, so the loss is a mean over nothing.

What it finds    cross_entropy or nll_loss whose every target is ignore_index (a batch of padding, a window without labels).
Why it matters   0 / 0 is NaN: averages and early stopping break, and with an update the weights may follow.
How it knows     the look back found the loss function that made the NaN and counted its targets.
Known problems   none known.
Fix              skip such batches, or use reduction="sum" and divide by the number of targets that count, at least one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.record import Step
from sonde.rules.origins import FOLLOWS, KEYS, Origins
from sonde.rules.rule import Answer


@dataclass(slots=True)
class AllTargetsIgnored:
    name: ClassVar[str] = "all-targets-ignored"
    explains: ClassVar[tuple[str, ...]] = FOLLOWS

    origins: Origins = field(default_factory=Origins)

    def see(self, step: Step) -> None:
        self.origins.see(step)

    def answer(self) -> Answer:
        return self.origins.answer(self.name, KEYS[self.name])

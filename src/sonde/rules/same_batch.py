"""Every step trains on the same batch, although the DataLoader has more.

What it finds    a DataLoader that is begun anew for every step, as in next(iter(loader)), without shuffling: it hands out its
                 first batch forever. (A loop that ends after the first batch of each epoch does the same.)
Why it matters   the model learns a handful of samples by heart, the loss falls beautifully, and nothing else is learnt.
How it knows     the content of each batch that the loader handed out, by a hash of all of its tensors, in every step that was
                 looked at, among them steps in a row; and the length of the loader.
Known problems   a batch taken out of the loader once and trained on for a while (K26) is a deliberate check: the loader is
                 not asked in each step, and nothing is said. Nor is it where the loader has one batch only. With random
                 augmentation the content differs, and with shuffle=True next(iter(loader)) gives another batch each time.
                 Batches that are made without a DataLoader are not judged, nor steps that are made of several batches.
Fix              iterate over the loader: for x, y in loader; or keep one iterator and call next() on that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.batches import ADJACENT, Loader, Repeats
from sonde.rules.rule import Answer, Clear, NotEvaluated

ENOUGH = 8  # batches: a check of the first steps is no training


@dataclass(slots=True)
class SameBatch:
    name: ClassVar[str] = "same-batch"
    explains: ClassVar[tuple[str, ...]] = ("label-constant", "no-shuffle", "loss-plateau", "vanishing-gradient", "dead-relu")

    loader: Loader = field(default_factory=Loader)
    repeats: Repeats = field(default_factory=Repeats)

    def see(self, step: Step) -> None:
        self.loader.see(step)
        self.repeats.see(step)

    def answer(self) -> Answer:
        seen = self.repeats
        if not seen.num:
            return NotEvaluated("no batch of a DataLoader was looked at")
        if seen.num_like_first < seen.num:
            return Clear()
        if not self.loader.num_batches:
            return NotEvaluated("how many batches the DataLoader has is not known")
        if self.loader.num_batches == 1:
            return Clear()
        if seen.num < ENOUGH or seen.num_adjacent < ADJACENT:
            return NotEvaluated(f"only {seen.num} batches were looked at, {seen.num_adjacent} right after another one")
        return [
            Finding(
                rule=self.name,
                severity=Severity.ERROR,
                where="",
                step=seen.first_step,
                cause=f"the DataLoader{self.loader.at} has {self.loader.num_batches} batches, and all {seen.num} that were looked at, from "
                f"step {seen.first_step} to step {seen.last_step}, were the same {seen.size} samples",
                fix="let one iterator go on: for x, y in loader, without a break after its first batch; or it = iter(loader) before the "
                "loop, and next(it) in it",
                evidence={
                    "num_looked_at": seen.num, "num_adjacent": seen.num_adjacent, "num_batches": self.loader.num_batches,
                    "batch_size": seen.size, **self.loader.evidence(),
                },
            )
        ]  # fmt: skip

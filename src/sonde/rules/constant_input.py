"""Nothing about the samples reaches the model: its input is the same for all of them.

What it finds    inputs that are all zero, or one and the same row for every sample of every batch.
Why it matters   the model can only learn how often each target occurs; zeros do not even give the first layer a gradient.
How it knows     in every step that was looked at, all samples in every input of the model were alike, bit for bit, and the
                 same as in all other steps.
Known problems   a mask, a start token or a position that is the same for all goes in beside inputs that are not: one input
                 that varies is enough, such as a hidden state (K97) or the edges of a graph (K98). Labels that the model is
                 given to compute its loss do not count. Copies of one sample (several draws for each, parallel
                 environments at their start) differ from step to step. Batches of one sample are not judged.
Fix              look at one batch right before model(...): what was multiplied, masked, cast or loaded so that nothing is left?
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Kind, Severity, Step
from sonde.rules.batches import NOTHING_SEEN, data_of
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.words import amount, number

ENOUGH = 5  # steps that were looked at: a first batch of zeros is often given to try the model out


@dataclass(slots=True)
class ConstantInput:
    name: ClassVar[str] = "constant-input"
    explains: ClassVar[tuple[str, ...]] = (
        "same-batch", "loss-plateau", "dead-relu", "vanishing-gradient", "unchanged-parameter", "iterable-duplicated", "exploding-gradient",
    )  # fmt: skip

    sources: Sources = field(default_factory=Sources)
    num: int = 0
    num_single: int = 0
    num_alike: int = 0
    samples: set[float] = field(default_factory=set)  # at most two: then they differ
    size: int = 0
    step: int = -1
    value: float = float("nan")  # of all numbers, where they are one

    def see(self, step: Step) -> None:
        self.sources.see(step)
        data = data_of(step)
        if not data:
            return
        if not amount(data, "num_inputs"):
            self.num_single += 1
            return
        self.num += 1
        if amount(data, "num_alike") < amount(data, "num_inputs"):
            return
        self.num_alike += 1
        if len(self.samples) < 2:
            self.samples.add(amount(data, "sample"))
        if self.num_alike == 1:
            self.step, self.size = step.number, int(amount(data, "size"))
            rows = [(site.path, row) for site, row in step.table(Kind.BATCH)]
            ends = next((row for path, row in rows if path.startswith("input.")), rows[0][1] if rows else {})
            if ends and ends.get("min") == ends.get("max"):
                self.value = ends["min"]

    def answer(self) -> Answer:
        if not self.num:
            return NotEvaluated("every batch had one sample") if self.num_single else NOTHING_SEEN
        if self.num_alike < self.num or len(self.samples) > 1:
            return Clear()
        if self.num < ENOUGH:
            return NotEvaluated(f"only {self.num} batches were looked at")
        what = f"every number was {number(self.value)}" if self.value == self.value else "all samples were one and the same"
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL,
                where="",
                step=self.step,
                cause=f"the model was given the same input for all samples of all {self.num} batches that were looked at: {what}"
                f"{self.sources.at('forward')}",
                fix="look at what reaches model(...): print x.float().std(dim=0) there, and go back to the line after which it is 0",
                evidence={
                    "num_looked_at": self.num, "batch_size": self.size, **({"value": self.value} if self.value == self.value else {}),
                    **self.sources.evidence("forward"),
                },
            )
        ]  # fmt: skip

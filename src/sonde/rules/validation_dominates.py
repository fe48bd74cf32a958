"""More time goes into validating than the training can spare.

What it finds    validations that are so frequent or so long that they take a large share of the run.
Why it matters   a curve with a tenth of the points tells the same; the time is better spent on training.
How it knows     from the first forward without gradients after a training step until the training goes on, without the time for data,
                 summed over the run, beside everything else.
Known problems   a target network, a teacher or a sampled action is a forward without gradients in every step and belongs to the
                 training: where most steps have as few of them as training forwards, they are not called validation. A validation
                 that keeps gradients on is counted as training. Validating once in a short run is not a habit: two are needed.
Fix              validate less often, or on a fixed part of the data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import ClassVar

from sonde.events import Finding, Step
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.timing import Timing, severity, with_gain
from sonde.rules.words import number

DOMINATES = 0.4  # share of the time: a validation per epoch on a fifth of the data takes less than a tenth
FINE = 0.1  # share that nobody minds: the proposal aims at it
USUAL = 0.5  # share of steps: what happens in more of them is part of the step …
MANY = 4  # … unless so many forwards are made without gradients for each one with


@dataclass(slots=True)
class ValidationDominates:
    name: ClassVar[str] = "validation-dominates"
    explains: ClassVar[tuple[str, ...]] = ("slow-step-outliers",)

    timing: Timing = field(default_factory=Timing)
    sources: Sources = field(default_factory=Sources)
    num: int = 0  # steps before which it was validated
    forwards: float = 0.0
    eval_forwards: float = 0.0

    def see(self, step: Step) -> None:
        self.sources.see(step)
        if self.timing.see(step) and step.scalars.get("validation_ms", 0.0) > 0:
            self.num += 1
            self.forwards += step.scalar("forwards", 0.0)
            self.eval_forwards += step.scalar("eval_forwards", 0.0)

    def answer(self) -> Answer:
        timing = self.timing
        if reason := timing.too_short():
            return NotEvaluated(reason)
        share = timing.share("validation")
        part_of_step = self.num > USUAL * timing.num and self.eval_forwards < MANY * self.forwards
        if share < DOMINATES or self.num < 2 or part_of_step:
            return Clear()
        rest = 1 - share
        fewer = max(2, ceil(share / (FINE / (1 - FINE) * rest)))
        gain = share * (1 - 1 / fewer)
        if not timing.worth(gain):
            return Clear()
        every = timing.num / self.num
        return [
            Finding(
                rule=self.name,
                severity=severity(gain),
                where="",
                step=timing.first_step,
                cause=f"{100 * share:.0f} % of the time is validation{self.sources.at('eval_forward')}: it comes every "
                f"{number(round(every, 1))} steps and takes {number(timing.totals['validation'] / self.num)} ms, a training step "
                f"{number(timing.usual_ms())} ms",
                fix=with_gain(f"validate {fewer} times less often (every {ceil(every * fewer)} steps), or on a part of the data", gain),
                evidence={
                    "gain": gain, "validation_share": share, "num_validations": self.num, "steps_between": every, "times_less_often": fewer,
                    **self.sources.evidence("eval_forward"),
                },
            )
        ]  # fmt: skip

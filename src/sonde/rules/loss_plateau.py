"""The loss has not moved from the level of blind guessing since the beginning.

What it finds    a training that demonstrably learns nothing, where no other rule knows why.
Why it matters   every further step is wasted.
How it knows     over many updates the loss never fell, by a margin or beyond its noise, and it lies at ln K, the cost
                 of guessing among the K classes that the output has, or it is the same number to the last bit
                 although parameters are updated.
Known problems   flat is not stuck: fine-tuning at a low loss (K24), resuming at convergence (K25), a noise floor
                 (K27) and label smoothing (K13) lie away from ln K. Losses of adversaries (K19) and of policies (K18)
                 do not fall when all is well: with several losses, or with one that is not positive, the rule is not
                 evaluated. A loss of exactly 0 may be a solved task.
Fix              check that the labels belong to the inputs and that the output depends on the input; then try a
                 larger learning rate, and one batch alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from statistics import median
from typing import ClassVar

import numpy as np

from sonde.record import Finding, Kind, Severity, Step
from sonde.rules.activity import Activity
from sonde.rules.learning import Learning
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.words import number

ENOUGH = 50  # updates: warm-up and a hard start take tens
CONSTANT = 20  # losses in a row with the same bits: no two different batches cost exactly the same
EARLY = 5  # losses: a constant that begins later was reached, not there from the start
TINY = 1e-5  # update per weight and step: healthy is 1e-4 to 1e-2


@dataclass(slots=True)
class LossPlateau:
    name: ClassVar[str] = "loss-plateau"
    explains: ClassVar[tuple[str, ...]] = ()

    activity: Activity = field(default_factory=Activity)
    learning: Learning = field(default_factory=Learning)
    sources: Sources = field(default_factory=Sources)
    ratios: list[float] = field(default_factory=list)  # update per weight, of the first observed steps

    def see(self, step: Step) -> None:
        self.activity.see(step)
        self.learning.see(step)
        self.sources.see(step)
        update, parameter = step.frames.get(Kind.UPDATE), step.frames.get(Kind.PARAMETER)
        if update is not None and parameter is not None and len(self.ratios) < ENOUGH:
            size = float(np.sqrt(np.square(parameter["l2"]).sum()))
            if size > 0:
                self.ratios.append(float(np.sqrt(np.square(update["l2"]).sum())) / size)

    def answer(self) -> Answer:
        learning, updates = self.learning, self.activity.updates
        if learning.num_losses < ENOUGH or updates < ENOUGH:
            return NotEvaluated(f"fewer than {ENOUGH} updates with a loss were seen")
        if learning.several:
            return NotEvaluated("several losses are trained in turn, and none of them need fall")
        if not learning.readable:
            return NotEvaluated("the loss is not positive, so that its level says nothing")
        if learning.gone or learning.risen or learning.fallen:
            return Clear()
        constant = learning.constant_in_a_row >= max(CONSTANT, learning.num_losses - EARLY) and learning.recent_level != 0
        classes = learning.chance
        if not constant and not classes:
            return NotEvaluated("the loss did not fall, but nothing shows that it should have")
        ratio = median(self.ratios) if self.ratios else float("nan")
        level = number(learning.recent_level)
        at = (
            f"the same to the last bit for {learning.constant_in_a_row} steps"
            if constant
            else f"what guessing among {classes} classes costs (ln {classes} = {log(classes):.4g})"
        )
        slow = ratio < TINY
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL,
                where="",
                step=max(learning.first_step, 0),
                cause=f"after {updates} updates the loss is still {level}, {at}{self.sources.at('backward')}"
                + (f"; an update changes the weights by only {number(ratio)} of their size" if slow else ""),
                fix="raise the learning rate: the updates are too small to matter"
                if slow
                else "check that labels belong to their inputs and that the output depends on the input; "
                "then try to learn a single batch by heart",
                evidence={
                    "first_level": learning.first_level,
                    "recent_level": learning.recent_level,
                    "updates": updates,
                    "update_per_weight": ratio,
                    **({"classes": classes} if classes else {}),
                    **self.sources.evidence("backward"),
                },
            )
        ]

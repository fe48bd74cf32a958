"""The gradient grows beyond all measure on its way through the model, and the training fails by it.

What it finds    deep or recurrent models whose signal is multiplied at every layer or time step: a gain too large,
                 recurrent weights too large, no normalisation, no clipping.
Why it matters   updates are thrown by it; the loss jumps, diverges or becomes NaN.
How it knows     already at the first observed step, before any update could be to blame, outputs or gradients grow by
                 orders of magnitude along the depth; or the gradient norm leaps to a hundred times its usual size
                 again and again; and the training fails. Where both outputs and gradients grow by a thousand, it is
                 said even if the loss still falls.
Known problems   large but even gradients come from a large loss (K28, K21), not from the model: depth is what tells.
                 Clipped training (K07, K40), skipped steps (K09) and everything that learns are left alone. A
                 learning rate too high makes large gradients after its first updates: that is lr-divergence. Raw
                 pixels (K22) are an input, not an output of a layer, and batch norm after them evens the signal.
Fix              clip gradients (torch.nn.utils.clip_grad_norm_), scale the initialisation to the fan-in, add
                 normalisation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.activity import count
from sonde.rules.blowup import Blowup
from sonde.rules.learning import Learning
from sonde.rules.origins import BAD_NUMBERS
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.words import number

LEAP = 100.0  # times the usual gradient norm: batches differ by factors of two to ten
USUAL = 20  # norms whose median is the usual one
NUM_LEAPS = 3  # a single outlier batch is not an explosion


@dataclass(slots=True)
class ExplodingGradient:
    name: ClassVar[str] = "exploding-gradient"
    explains: ClassVar[tuple[str, ...]] = (
        "lr-divergence", *BAD_NUMBERS, "dead-relu", "loss-plateau", "vanishing-gradient", "unchanged-parameter",
    )  # fmt: skip

    learning: Learning = field(default_factory=Learning)
    sources: Sources = field(default_factory=Sources)
    blowup: Blowup = field(default_factory=Blowup)
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL))
    num_norms: int = 0
    num_leaps: int = 0
    first_leap: int = -1
    largest: float = 0.0
    usual: float = float("nan")  # at the first leap

    def see(self, step: Step) -> None:
        self.learning.see(step)
        self.sources.see(step)
        self.blowup.see(step)
        norm = step.scalar("grad_norm")
        if not isfinite(norm) or count(step, "skipped_steps") or norm <= 0:
            return
        self.num_norms += 1
        self.largest = max(self.largest, norm)
        if len(self.norms) == USUAL and norm > LEAP * median(self.norms):
            self.num_leaps += 1
            if self.first_leap < 0:
                self.first_leap, self.usual = step.number, median(self.norms)
        self.norms.append(norm)

    def answer(self) -> Answer:
        if not self.num_norms and not self.learning.num_nonfinite:
            return NotEvaluated("no gradients were observed")
        failing = self.learning.failing
        if self.blowup.both_ways and not failing:
            sentence = f"{self.blowup.sentence}, and the outputs grow alike"
            level = f"the loss began at {number(self.learning.first_level)} and is at {number(self.learning.recent_level)}"
            return [self._finding(self.blowup.step, self.blowup.where, sentence, level, Severity.WARNING)]
        if not failing:
            return Clear()
        if self.blowup.grows_with_depth:
            return [self._finding(self.blowup.step, self.blowup.where, self.blowup.sentence, failing)]
        if self.num_leaps >= NUM_LEAPS and not self.blowup.thrown:
            sentence = f"the gradient norm leapt to more than {LEAP:g} times its usual {number(self.usual)} in {self.num_leaps} steps"
            return [self._finding(self.first_leap, "", sentence, failing)]
        return Clear()

    def _finding(
        self, step: int, where: str, sentence: str, failing: str, severity: Severity = Severity.CRITICAL
    ) -> Finding:
        return Finding(
            rule=self.name,
            severity=severity,
            where=where,
            step=step,
            cause=f"{sentence}, and {failing}",
            fix="clip the gradients with torch.nn.utils.clip_grad_norm_, scale the initialisation to the fan-in, or add normalisation",
            evidence={
                "largest_grad_norm": self.largest,
                "num_leaps": self.num_leaps,
                "clips": "yes" if self.sources.line("clip") else "no",
                **self.blowup.evidence(),
                **self.sources.evidence("backward"),
            },
        )

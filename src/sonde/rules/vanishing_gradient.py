"""The gradient fades on its way to the first layers, and the training does not get off the ground.

What it finds    a deep model whose first layers get next to no gradient: many saturating activations, weights
                 initialised too small, no normalisation.
Why it matters   the first layers stay random, and the layers above them cannot learn from noise.
How it knows     the gradient at the first layers is many orders of magnitude below that at the last ones, layer by
                 layer and not at one place, in several observed steps in a row up to the last, while the loss does
                 not move.
Known problems   gradients that are small everywhere (K25, K10) have no slope. A model that learns is never judged,
                 however steep the slope. A cliff at one place is something else: dead units, a detached or rounded
                 value. Exact zeros in the first step (K14, K30) go away. Norms are compared, not shares of zeros: a
                 large embedding (K03) is no vanishing gradient. Saturated gates (K31) are in models that learn.
Fix              use ReLU-like activations, normalisation or residual connections, and an initialisation that fits the
                 activation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.depth import DepthProfile, profile
from sonde.rules.learning import Learning
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.words import number

FADED = 1e-3  # first layer over last ones: the healthy controls sit between 0.05 and 20, eight sigmoids at 1e-5
PATIENCE = 3  # observed steps in a row, to the last: as many as every run has from its start
CLIFF = 0.8  # share of the fall at one place: above it, it is not fading


@dataclass(slots=True)
class VanishingGradient:
    name: ClassVar[str] = "vanishing-gradient"
    explains: ClassVar[tuple[str, ...]] = ("loss-plateau", "unchanged-parameter", "dead-relu")

    learning: Learning = field(default_factory=Learning)
    num_profiles: int = 0
    in_a_row: int = 0
    step: int = -1
    last: DepthProfile | None = None

    def see(self, step: Step) -> None:
        self.learning.see(step)
        seen = profile(step, over_time=False)
        if seen is None:
            return
        self.num_profiles += 1
        if seen.backward <= FADED and seen.steepest <= CLIFF:
            self.in_a_row += 1
            if self.in_a_row == 1:
                self.step = step.number
            self.last = seen
        else:
            self.in_a_row = 0

    def answer(self) -> Answer:
        if self.num_profiles < PATIENCE:
            return NotEvaluated("gradients along the depth of a model were not observed often enough")
        failing = self.learning.stuck
        if self.in_a_row < PATIENCE or self.last is None or not failing:
            return Clear()
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL,
                where=self.last.first,
                step=self.step,
                cause=f"the gradient at {self.last.first} is {number(self.last.backward)} times that at {self.last.last}, "
                f"{self.last.num_layers} layers on, in {self.in_a_row} observed steps in a row, and {failing}",
                fix="use ReLU-like activations, normalisation or residual connections, and an initialisation that fits the activation",
                evidence={
                    "first_over_last": self.last.backward,
                    "num_layers": self.last.num_layers,
                    "last_layer": self.last.last,
                    "observed_steps": self.in_a_row,
                    "first_loss": self.learning.first_level,
                    "recent_loss": self.learning.recent_level,
                },
            )
        ]

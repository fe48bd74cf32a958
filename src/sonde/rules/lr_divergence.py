"""The updates are larger than the training can bear: the loss leaves its starting level and does not come back.

What it finds    a learning rate far too high for this model and optimizer.
Why it matters   each step overshoots further than the last; the loss explodes, becomes NaN, or the model is thrown to
                 where nothing can be learnt.
How it knows     inputs and first gradients were in order, then updates as large as the weights themselves, or a loss
                 and gradient that climb together step by step; and the loss ends far above its start, not finite, or
                 never below it.
Known problems   high rates that learn (K23) are never judged. A loss that only rises because of adversaries (K19)
                 does not count, nor does the error of a value estimate that grows with the values (DQN). A NaN
                 without the climb before it is nonfinite-loss. Signals that were out of bounds before the first
                 update are exploding-gradient; forgotten zero_grad and bad inputs are named by their own rules, as
                 the cause of this one.
Fix              divide the learning rate by ten until the loss falls; add warm-up or clipping if only the start is
                 rough.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.activity import Activity
from sonde.rules.blowup import Blowup
from sonde.rules.learning import Learning
from sonde.rules.origins import BAD_NUMBERS
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.words import number

CLIMB = 10.0  # times the starting loss, on the way to a loss that is not finite: noise stays below
FAR = 1000.0  # times the starting loss, where it stays finite: errors of growing value estimates stay below
NUM_CLIMBED = 2  # losses that high before the end
EARLY_THROW = 1.0  # update over weights that by itself explains a loss that never falls


@dataclass(slots=True)
class LrDivergence:
    name: ClassVar[str] = "lr-divergence"
    explains: ClassVar[tuple[str, ...]] = (
        *BAD_NUMBERS, "dead-relu", "loss-plateau", "vanishing-gradient", "exploding-gradient", "unchanged-parameter",
    )  # fmt: skip

    activity: Activity = field(default_factory=Activity)
    learning: Learning = field(default_factory=Learning)
    sources: Sources = field(default_factory=Sources)
    blowup: Blowup = field(default_factory=Blowup)
    first_lr: float = float("nan")
    first_norm: float = float("nan")
    largest_norm: float = float("nan")
    num_climbed: int = 0
    climbed_step: int = -1

    def see(self, step: Step) -> None:
        self.activity.see(step)
        self.learning.see(step)
        self.sources.see(step)
        self.blowup.see(step)
        lr, norm, loss = step.scalar("lr"), step.scalar("grad_norm"), step.scalar("loss")
        if not self.first_lr > 0:
            self.first_lr = lr
        if isfinite(norm):
            if self.first_norm != self.first_norm:
                self.first_norm = norm
            if not self.largest_norm >= norm:
                self.largest_norm = norm
        first = self.learning.first
        if first and min(first) > 0 and isfinite(loss) and loss > CLIMB * first[0] and self.learning.num_losses > 1:
            self.num_climbed += 1
            if self.climbed_step < 0:
                self.climbed_step = step.number

    def answer(self) -> Answer:
        if not self.activity.totals["optimizer_steps"]:
            return NotEvaluated("no optimizer stepped")
        if not self.learning.num_losses:
            return NotEvaluated("no backward was seen")
        failing = self.learning.failing
        if not failing or self.blowup.grows_with_depth:
            return Clear()
        lost = self.learning.gone or self.learning.risen
        far = self.learning.gone or self.learning.recent_level > FAR * self.learning.first_level
        climbed = lost and far and self.num_climbed >= NUM_CLIMBED
        thrown = self.blowup.thrown and (lost or self.blowup.largest_ratio >= EARLY_THROW)
        if not climbed and not thrown:
            return Clear()
        steps = [s for s in (self.climbed_step if climbed else -1, self.blowup.thrown_step if thrown else -1) if s >= 0]
        how = (
            f"an update was {number(self.blowup.largest_ratio)} times the size of all weights"
            if thrown
            else f"the loss climbed above {CLIMB:g} times its start, the gradient norm from {number(self.first_norm)} "
            f"to {number(self.largest_norm)}"
        )
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL,
                where="",
                step=min(steps),
                cause=f"with a learning rate of {number(self.first_lr)}{self.sources.at('optimizer')} {how}, and {failing}",
                fix=f"lower the learning rate (try {number(self.first_lr / 10)} and below), or warm it up"
                if isfinite(self.first_lr)
                else "lower the learning rate by a factor of ten until the loss falls",
                evidence={
                    "lr": self.first_lr,
                    "first_loss": self.learning.first_level,
                    "worst_loss": self.learning.worst,
                    "first_grad_norm": self.first_norm,
                    "largest_grad_norm": self.largest_norm,
                    **self.blowup.evidence(),
                    **self.sources.evidence("optimizer"),
                },
            )
        ]

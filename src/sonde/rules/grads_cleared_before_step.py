"""The gradients are cleared after backward wrote them and before the optimizer could use them.

What it finds    zero_grad() stands between backward() and step().
Why it matters   the optimizer finds nothing to do: no parameter changes, and nothing complains.
How it knows     an optimizer step found every gradient None or zero, although a backward had left non-zero gradients
                 in these parameters since the step before: exact, and repeated.
Known problems   a loss whose true gradient is zero leaves no non-zero gradient behind, so it is not this. Experts and
                 heads that are idle in a step (K15, K32) are some parameters, not all of an optimizer's. A GAN that
                 clears the discriminator's leftovers does so before the next backward of that optimizer.
Fix              call zero_grad() before backward, not after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.activity import Activity, count
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources

PATIENCE = 3  # updates in a row: a loop may drop one batch on purpose, e.g. after a bad loss


@dataclass(slots=True)
class GradsClearedBeforeStep:
    name: ClassVar[str] = "grads-cleared-before-step"
    explains: ClassVar[tuple[str, ...]] = ("loss-plateau", "unchanged-parameter", "vanishing-gradient", "dead-relu", "lr-zero")

    activity: Activity = field(default_factory=Activity)
    sources: Sources = field(default_factory=Sources)
    in_a_row: int = 0
    row_step: int = -1
    step: int = -1

    def see(self, step: Step) -> None:
        self.activity.see(step)
        self.sources.see(step)
        if count(step, "cleared_updates"):
            if not self.in_a_row:
                self.row_step = step.number
            self.in_a_row += 1
            if self.in_a_row >= PATIENCE and self.step < 0:
                self.step = self.row_step
        elif count(step, "optimizer_steps"):
            self.in_a_row = 0

    def answer(self) -> Answer:
        totals = self.activity.totals
        if self.step < 0:
            if totals["optimizer_steps"] < PATIENCE:
                return NotEvaluated(f"only {totals['optimizer_steps']} optimizer steps were taken")
            return Clear()
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL,
                where="",
                step=self.step,
                cause=f"{totals['cleared_updates']} of {totals['optimizer_steps']} optimizer steps found no gradient, "
                f"because they were cleared{self.sources.at('zero_grad')} after backward had written them",
                fix="move zero_grad() in front of backward(), so that the order is zero_grad, backward, step",
                evidence={
                    "cleared_updates": totals["cleared_updates"],
                    "optimizer_steps": totals["optimizer_steps"],
                    "backwards": totals["backwards"],
                    **self.sources.evidence("zero_grad"),
                },
            )
        ]

"""The optimizer steps, but nobody ever computed a gradient.

What it finds    loss.backward() is never called.
Why it matters   optimizer.step() passes silently over parameters without gradients: nothing is learnt and nothing
                 complains.
How it knows     there were optimizer steps, every one of them found each gradient None or zero, and no backward ran
                 in the whole run.
Known problems   gradients written by hand or by torch.autograd.grad (evolution strategies, pipeline schedules) are
                 gradients: such steps are not empty.
Fix              call loss.backward() before optimizer.step().
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.activity import Activity, count
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources

ENOUGH = 5  # optimizer steps: some programs step once to initialise an optimizer's state


@dataclass(slots=True)
class MissingBackward:
    name: ClassVar[str] = "missing-backward"
    explains: ClassVar[tuple[str, ...]] = ("loss-plateau", "unchanged-parameter", "lr-zero", "train-in-eval-mode")

    activity: Activity = field(default_factory=Activity)
    sources: Sources = field(default_factory=Sources)
    step: int = -1

    def see(self, step: Step) -> None:
        self.activity.see(step)
        self.sources.see(step)
        if self.step < 0 and count(step, "optimizer_steps"):
            self.step = step.number

    def answer(self) -> Answer:
        totals = self.activity.totals
        if not self.activity.num_optimizers and not totals["optimizer_steps"]:
            return NotEvaluated("no optimizer was seen")
        if totals["backwards"]:
            return Clear()
        if totals["optimizer_steps"] < ENOUGH:
            return NotEvaluated(f"only {totals['optimizer_steps']} optimizer steps were taken")
        if totals["empty_updates"] < totals["optimizer_steps"]:
            return Clear()
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL,
                where="",
                step=self.step,
                cause=f"all {totals['optimizer_steps']} optimizer steps{self.sources.at('optimizer_step')} found no gradient "
                "at any parameter, and backward was never called",
                fix="call loss.backward() before optimizer.step()",
                evidence={
                    "optimizer_steps": totals["optimizer_steps"],
                    "empty_updates": totals["empty_updates"],
                    "backwards": 0,
                    **self.sources.evidence("optimizer_step"),
                },
            )
        ]

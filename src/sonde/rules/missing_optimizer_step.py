"""Gradients are computed again and again, and no optimizer ever uses them.

What it finds    an optimizer was built, backward runs, but optimizer.step() is never called.
Why it matters   no parameter ever changes: nothing is learnt.
How it knows     in the whole run there were backward calls and an optimizer with parameters of the model, but not one
                 step, not one step that a GradScaler held back, and not one change of a parameter by hand.
Known problems   a GradScaler that skips its first steps (K09) has skipped steps, not missing ones. Manual updates
                 without an optimizer are seen as updates. Accumulation over more batches than the run has is, in
                 effect, this defect.
Fix              call optimizer.step() after backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.activity import Activity, count
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources

ENOUGH = 10  # backward calls: an accumulation that is cut off by the end of a short run has fewer


@dataclass(slots=True)
class MissingOptimizerStep:
    name: ClassVar[str] = "missing-optimizer-step"
    explains: ClassVar[tuple[str, ...]] = (
        "loss-plateau", "unchanged-parameter", "vanishing-gradient", "exploding-gradient", "dead-relu", "lr-divergence",
        "train-in-eval-mode",
    )  # fmt: skip

    activity: Activity = field(default_factory=Activity)
    sources: Sources = field(default_factory=Sources)
    step: int = -1
    num_owned: int = -1  # unknown until a membership event says it

    def see(self, step: Step) -> None:
        self.activity.see(step)
        self.sources.see(step)
        if self.step < 0 and count(step, "backwards"):
            self.step = step.number
        for event in step.events:
            if event.kind == "membership":
                self.num_owned = sum(int(one.get("num_owned", 0)) for one in event.data.get("optimizers", ()))

    def answer(self) -> Answer:
        if not self.activity.num_optimizers:
            return NotEvaluated("no optimizer was seen")
        if self.activity.updates:
            return Clear()
        backwards = self.activity.totals["backwards"]
        if backwards < ENOUGH:
            return NotEvaluated(f"only {backwards} backward calls were made")
        if self.num_owned == 0:
            return NotEvaluated("no optimizer holds a parameter of the model that ran")
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL,
                where="",
                step=self.step,
                cause=f"backward ran {backwards} times{self.sources.at('backward')}, but optimizer.step() was never called",
                fix="call optimizer.step() after loss.backward()",
                evidence={
                    "backwards": backwards,
                    "optimizer_steps": 0,
                    "zero_grads": self.activity.totals["zero_grads"],
                    **self.sources.evidence("backward"),
                },
            )
        ]

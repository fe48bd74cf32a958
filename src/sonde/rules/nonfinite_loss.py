"""The loss is NaN or Inf, and none of the known ways to get there explains it.

What it finds    a loss that stops being a number by itself: a logarithm of zero, a division by an empty count, a root
                 at zero, a batch whose every label is ignored, bad labels.
Why it matters   with backward and an update the weights become NaN and stay so; without them, averages and early
                 stopping go wrong.
How it knows     the loss of a step with a backward was not finite. It says what else was not finite by then: the
                 output of a layer (the forward made it), a gradient before the loss (the backward made it), or
                 neither (what is computed from the outputs made it, or the targets).
Known problems   a GradScaler that skips a step has dealt with it (K09). Divergence and bad inputs have rules of their
                 own and come first.
Fix              look at the place named as the first that was not finite; clamp, add an epsilon, or skip empty
                 batches there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from sonde.events import Finding, Kind, Severity, Step
from sonde.rules.activity import count
from sonde.rules.learning import Learning
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.words import number


@dataclass(slots=True)
class NonfiniteLoss:
    name: ClassVar[str] = "nonfinite-loss"
    explains: ClassVar[tuple[str, ...]] = (
        "loss-plateau", "dead-relu", "vanishing-gradient", "unchanged-parameter", "exploding-gradient",
        "nonfinite-evaluation",
    )  # fmt: skip

    learning: Learning = field(default_factory=Learning)
    sources: Sources = field(default_factory=Sources)
    first_bad: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)  # what -> step and event, up to the first bad loss
    last_good: float = float("nan")
    outputs: list[tuple[str, float]] = field(default_factory=list)  # at the first bad loss, where it was observed: how many are not finite

    def see(self, step: Step) -> None:
        self.sources.see(step)
        over = self.learning.first_nonfinite_step >= 0
        self.learning.see(step)
        if over:
            return
        if not count(step, "skipped_steps"):
            for event in step.events:
                if event.kind == "nonfinite":
                    self.first_bad.setdefault(str(event.data.get("what", "")), (step.number, dict(event.data)))
        if self.learning.first_nonfinite_step == step.number:
            self.outputs = [(site.name, float(row["nan"] + row["inf"])) for site, row in step.table(Kind.ACTIVATION)]
        if self.learning.first_nonfinite_step < 0 and self.learning.recent:
            self.last_good = self.learning.recent[-1]

    def answer(self) -> Answer:
        learning = self.learning
        if not learning.num_losses:
            return NotEvaluated("no backward was seen")
        bad = learning.first_nonfinite_step
        if bad < 0:
            return Clear()
        step, where, what = self._origin(bad)
        recovered = learning.nonfinite_in_a_row == 0
        severity = Severity.WARNING if recovered and learning.num_nonfinite <= len(learning.recent) else Severity.CRITICAL
        went_on = f"; {learning.num_nonfinite} of {learning.num_losses} losses are not finite" if learning.num_losses > 1 else ""
        return [
            Finding(
                rule=self.name,
                severity=severity,
                where=where,
                step=min(step, bad),
                cause=f"the loss is not finite at step {bad}{self.sources.at('backward')}: {what}{went_on}",
                fix="look at the arithmetic named here for log(0), a division by zero, a root at zero or an empty batch, and guard it",
                evidence={
                    "first_nonfinite_step": bad,
                    "num_nonfinite": learning.num_nonfinite,
                    "num_losses": learning.num_losses,
                    "last_finite_loss": self.last_good,
                    **self.sources.evidence("backward"),
                },
            )
        ]

    def _origin(self, bad: int) -> tuple[int, str, str]:
        """The first step and place that were not finite, and what that says."""
        gradient = self.first_bad.get("gradient")
        if gradient is not None and gradient[0] < bad:
            place = str(gradient[1].get("where", ""))
            what = f"the gradient of {place or 'a parameter'} was not finite at step {gradient[0]}"
            return gradient[0], place, f"{what} although the loss was, so backward or what came after it made it"
        first = next(((place, num) for place, num in self.outputs if num), None)
        if first is not None:
            return bad, first[0], f"the output of {first[0]} was not finite already ({number(first[1])} numbers), so the forward made it"
        if not self.outputs:
            return bad, "", "what the model put out in that step was not measured"
        return bad, "", "the outputs of all layers were finite, so what is computed from them made it, or the targets"

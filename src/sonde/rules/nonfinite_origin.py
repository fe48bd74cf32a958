"""The first NaN or Inf of the training, and the operation that made it.

What it finds    an operation that was given finite numbers and put out a NaN or an Inf, from which the bad loss or gradient follows: a
                 logarithm of zero, a division by an empty count, an exponential that overflows, a softmax over a row that is all masked;
                 or a weight or a batch that was bad before the step began.
Why it matters   everything after it is NaN. The line that made it is rarely the line where the NaN is noticed.
How it knows     when the loss or a gradient is not finite, and before anything has used it, the step is run again with every operation
                 looked at: same inputs, same random numbers, afterwards everything as it was. Halves of the batch are run to find the
                 samples that trigger it.
                 Where that finds nothing, gradients that stay bad while the optimizer uses them are told all the same, unless the loss is
                 bad too: nonfinite-loss speaks of that.
Known problems   a step that cannot be run again (it reads from a stream, it changes objects of its own) is explained by the model alone
                 or by the graph of the loss; the notes say so. Masks of -Inf that do no harm are not counted. Where the weights had
                 diverged before, lr-divergence comes first.
Fix              what the finding says: it knows the operation and its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.activity import count
from sonde.rules.origins import FOLLOWS, Origins
from sonde.rules.rule import Answer, NotEvaluated

STAYED_BAD = 3  # steps in a row: one bad update makes the weights bad, and these every gradient after it; a passing one does not


@dataclass(slots=True)
class NonfiniteOrigin:
    name: ClassVar[str] = "nonfinite-origin"
    explains: ClassVar[tuple[str, ...]] = FOLLOWS

    origins: Origins = field(default_factory=Origins)
    in_a_row: int = 0  # steps up to now whose bad gradient the optimizer used
    since: int = -1
    where: str = ""
    loss_is_bad: bool = False

    def see(self, step: Step) -> None:
        self.origins.see(step)
        bad = {str(event.data.get("what", "")): str(event.data.get("where", "")) for event in step.events if event.kind == "nonfinite"}
        self.loss_is_bad |= "loss" in bad
        if "gradient" not in bad or count(step, "skipped_steps"):
            self.in_a_row = 0
            return
        if not self.in_a_row:
            self.since, self.where = step.number, bad["gradient"]
        self.in_a_row += 1

    def answer(self) -> Answer:
        answer = self.origins.answer(self.name)
        if not isinstance(answer, NotEvaluated) or not self.origins.unknown or self.loss_is_bad or self.in_a_row < STAYED_BAD:
            return answer
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL,
                where=self.where,
                step=self.since,
                cause=(
                    f"the gradient of {self.where or 'a parameter'} was not finite at step {self.since}, the optimizer used it, and in all "
                    f"{self.in_a_row} steps from there on gradients are bad, though the loss is finite; "
                    f"where it was made could not be found: {self.origins.unknown}"
                ),
                fix="put `with sonde.find_origin():` around the forward and backward of each batch to name the operation",
                evidence={"bad_steps": self.in_a_row, "first_bad_step": self.since},
            )
        ]

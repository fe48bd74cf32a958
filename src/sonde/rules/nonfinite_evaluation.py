"""A model puts out NaN, or an Inf that cannot be meant, when it is evaluated.

What it finds    outputs of a model that are not finite in a forward without gradients, or in evaluation mode: a variance of one sample, a
                 division by an empty count, running statistics that were never filled, half precision that overflows.
Why it matters   no loss goes bad, so training looks fine. Averages over the evaluation, early stopping and whatever is predicted are wrong.
How it knows     what the model puts out in evaluation is looked at, as often as 2 % of the evaluation's own time allows. A bad output is
                 made again with every operation looked at, on the same inputs and with the same random numbers; parts of the batch are
                 run to find the samples that trigger it.
Known problems   -Inf in logits or log-probabilities is meant, and silent; an Inf counts only where a number outgrew its type (overflow) or
                 was divided by 0, or where a weight is Inf. What the training puts out too is silent, if nothing comes of it there: rows
                 of padding that nobody uses. Where the training went bad before, the evaluation follows from that. Not every forward of
                 a fast model is looked at, and outputs that are on a device are not looked at.
Fix              what the finding says: it knows the operation and its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.activity import count
from sonde.rules.origins import EVALUATION, Origins
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.words import number


@dataclass(slots=True)
class NonfiniteEvaluation:
    name: ClassVar[str] = "nonfinite-evaluation"
    explains: ClassVar[tuple[str, ...]] = ()

    origins: Origins = field(default_factory=lambda: Origins(in_evaluation=True))
    num_forwards: int = 0
    first_bad: dict[str, Any] = field(default_factory=dict)
    bad_step: int = -1

    def see(self, step: Step) -> None:
        self.origins.see(step)
        self.num_forwards += count(step, "eval_forwards") + count(step, "root_in_eval")
        if self.bad_step < 0:
            for event in step.events:
                if event.kind == "nonfinite" and event.data.get("what") == EVALUATION:
                    self.first_bad, self.bad_step = dict(event.data), event.step
                    break

    def answer(self) -> Answer:
        if self.origins.step >= 0:
            return [self.origins.finding(self.name, Severity.ERROR)]
        if self.bad_step >= 0:
            return [self._without_origin()]
        return Clear() if self.num_forwards else NotEvaluated("no step with a forward in evaluation was recorded")

    def _without_origin(self) -> Finding:
        nan, infinite = float(self.first_bad.get("num_nan", 0)), float(self.first_bad.get("num_inf", 0))
        elements = float(self.first_bad.get("num_elements", 0))
        what = " and ".join(f"{number(n)} {name}" for n, name in ((nan, "NaN"), (infinite, "Inf")) if n) or "non-finite numbers"
        why = f"; where they were made could not be found: {self.origins.unknown}" if self.origins.unknown else ""
        return Finding(
            rule=self.name,
            severity=Severity.ERROR,
            where=str(self.first_bad.get("where", "")),
            step=self.bad_step,
            cause=f"in evaluation, at step {self.bad_step}, the model put out {what} among {number(elements)} numbers{why}",
            fix="run that batch inside of sonde.find_origin(model), which names the operation that makes them",
            evidence={"num_nan": nan, "num_inf": infinite, "num_elements": elements},
        )

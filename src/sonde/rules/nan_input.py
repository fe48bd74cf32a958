"""A batch with NaN or Inf goes into the model, and the loss goes with it.

What it finds    missing values or overflow in the data.
Why it matters   one bad cell makes the loss and every gradient NaN; one update later so is every weight.
How it knows     what went into the root model was not finite, at or before the first step whose loss, output or
                 gradients were not finite.
Known problems   attention masks of -Infinity, and NaN that the model replaces on purpose, go in without harm: an
                 input counts only when something after it in the same step is not finite. Bad numbers in the labels
                 do not go into the model; nonfinite-loss speaks of them.
Fix              find the rows (torch.isfinite(x).all(dim=1)) and drop or fill them before training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.activity import count
from sonde.rules.learning import losses
from sonde.rules.origins import BAD_NUMBERS
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.words import number


@dataclass(slots=True)
class NanInput:
    name: ClassVar[str] = "nan-input"
    explains: ClassVar[tuple[str, ...]] = (
        *BAD_NUMBERS, "lr-divergence", "exploding-gradient", "vanishing-gradient", "dead-relu", "loss-plateau", "unchanged-parameter",
    )  # fmt: skip

    sources: Sources = field(default_factory=Sources)
    num_forwards: int = 0
    first_bad_step: int = -1  # of anything after the input
    bad_input: dict[str, Any] = field(default_factory=dict)
    input_step: int = -1
    num_bad_inputs: int = 0

    def see(self, step: Step) -> None:
        self.sources.see(step)
        self.num_forwards += count(step, "forwards")
        seen: dict[str, dict[str, Any]] = {}
        for event in step.events:
            if event.kind == "nonfinite":
                seen.setdefault(str(event.data.get("what", "")), dict(event.data))
        harmed = any(what in seen for what in ("output", "gradient")) or losses(step)[1]
        given = seen.get("input")
        if given is not None:
            self.num_bad_inputs += 1
        if not harmed or self.first_bad_step >= 0:
            return
        self.first_bad_step = step.number
        if given is not None:
            self.bad_input, self.input_step = given, step.number

    def answer(self) -> Answer:
        if not self.bad_input:
            return Clear() if self.num_forwards else NotEvaluated("no forward of a watched model was seen")
        nan, infinite = float(self.bad_input.get("num_nan", 0)), float(self.bad_input.get("num_inf", 0))
        elements = float(self.bad_input.get("num_elements", 0))
        what = " and ".join(f"{number(n)} {name}" for n, name in ((nan, "NaN"), (infinite, "Inf")) if n) or "non-finite numbers"
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL,
                where=str(self.bad_input.get("where", "")),
                step=self.input_step,
                cause=f"the input of step {self.input_step} had {what} among its {number(elements)} numbers, before anything else was bad"
                f"{self.sources.at('forward')}",
                fix="find the rows that are not finite (torch.isfinite) and drop or fill them before they reach the model",
                evidence={
                    "num_nan": nan,
                    "num_inf": infinite,
                    "num_elements": elements,
                    "steps_with_bad_input": self.num_bad_inputs,
                    **self.sources.evidence("forward"),
                },
            )
        ]

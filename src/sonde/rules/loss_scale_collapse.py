"""The scale of a GradScaler falls and falls: step after step is skipped.

What it finds    gradients that are not finite whatever the scale: an operation that overflows in half precision by itself, a NaN that the
                 scaler hides by skipping, a training that diverges.
Why it matters   a skipped step trains nothing, and says nothing. Below a scale of 1 small gradients are lost to rounding.
How it knows     steps are skipped with a scale below 1; or many in a row while the gradients are bad without any scale too; or the
                 scale has lost three decimal places since it had settled. The step is looked back at: which operation made the Inf, and
                 is the gradient finite without the scale?
Known problems   the first skips, while the scaler looks for its level (K09), and single ones later, when it tries a larger scale, are
                 how it works. A scale on a device is read with the next observed step.
Fix              run the operation that is named in float32 (autocast(enabled=False)) or use bfloat16; where the scale is not to blame, mend
                 the operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.activity import count
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.words import number

FLOOR = 1.0  # a scale below it makes gradients smaller instead of larger: torch's own manual calls it a sign that something is wrong
NUM_BELOW = 3  # steps skipped down there: a scaler that was given a low scale may skip one
SETTLED = 20  # updates that were made: then the scaler has found its level
FELL = 1000.0  # times: ten halvings more than it has grown
HOPELESS = 8  # steps skipped in a row that no scale can save
STUCK = 10  # steps in a row, up to the last: nothing is learnt any more


@dataclass(slots=True)
class LossScaleCollapse:
    name: ClassVar[str] = "loss-scale-collapse"
    explains: ClassVar[tuple[str, ...]] = ("unchanged-parameter", "loss-plateau", "vanishing-gradient", "dead-relu")

    num_backwards: int = 0
    num_scaled: int = 0  # steps with a GradScaler
    num_made: int = 0
    num_skipped: int = 0
    in_a_row: int = 0
    longest_row: int = 0
    num_below: int = 0
    first_scale: float = float("nan")
    settled: float = 0.0  # the largest scale with which updates were made since the scaler found its level
    lowest: float = float("inf")
    collapsed_step: int = -1
    told: Mapping[str, Any] = field(default_factory=dict)  # the event that says most

    def see(self, step: Step) -> None:
        for event in step.events:
            if event.kind == "overflow" and (event.data.get("by") or not self.told.get("by")):
                self.told = dict(event.data)
        self.num_backwards += count(step, "backwards")
        scale, skipped = step.scalar("loss_scale"), count(step, "skipped_steps")
        if not isfinite(scale):
            return
        self.num_scaled += 1
        if self.first_scale != self.first_scale:
            self.first_scale = scale
        if not skipped:
            self.in_a_row = 0
            self.num_made += count(step, "optimizer_steps") > 0
            if self.num_made >= SETTLED:
                self.settled = max(self.settled, scale)
            return
        self.num_skipped += 1
        self.in_a_row += 1
        self.longest_row = max(self.longest_row, self.in_a_row)
        self.lowest = min(self.lowest, scale)
        self.num_below += scale < FLOOR
        if self.collapsed_step < 0 and self._is_collapsing(scale):
            self.collapsed_step = step.number

    def _is_collapsing(self, scale: float) -> bool:
        hopeless = self.in_a_row >= HOPELESS and self.told.get("by") == "number"
        return self.num_below >= NUM_BELOW or hopeless or self.settled >= FELL * scale

    def answer(self) -> Answer:
        if not self.num_backwards:
            return NotEvaluated("no backward was seen")
        if self.collapsed_step < 0:
            return Clear()
        by, origin = str(self.told.get("by", "")), self.told.get("origin") or {}
        fell = f"the scale fell from {number(max(self.settled, self.first_scale))} to {number(self.lowest)}"
        where = str(origin.get("module") or self.told.get("where", ""))
        first = f"; the gradient of {self.told['where']} is the first that is not finite" if self.told.get("where") else ""
        made = self._made(origin) if origin else ""
        hopeless = ", with or without a scale, so no scale can help" if by == "number" else ""
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL if self.in_a_row >= STUCK else Severity.ERROR,
                where=where,
                step=self.collapsed_step,
                cause=f"a GradScaler skipped {self.num_skipped} of {self.num_scaled} steps and {fell}{made or first}{hopeless}",
                fix=self._fix(by, origin),
                evidence=self._evidence(by, origin),
            )
        ]

    @staticmethod
    def _made(origin: Mapping[str, Any]) -> str:
        back = "the backward of " if origin.get("phase") == "backward" else ""
        at = f" at {origin['source']}" if origin.get("source") else ""
        made = "NaN" if origin.get("kind") == "nan" else "Inf"
        return f"; {back}{origin.get('operation', '')}{at} makes the {made}: {origin.get('cause', '')}"

    @staticmethod
    def _fix(by: str, origin: Mapping[str, Any]) -> str:
        if by == "number" and origin.get("fix") and origin.get("key") != "fp16-overflow":
            return str(origin["fix"])
        return (
            "keep the loss and its targets near 1 (normalise them, take a mean instead of a sum), run that part in float32 "
            "(torch.autocast(enabled=False)), or use bfloat16"
        )

    def _evidence(self, by: str, origin: Mapping[str, Any]) -> dict[str, float | str]:
        found: dict[str, float | str] = {}
        if origin.get("source"):
            found |= {"source": str(origin["source"]), "source_text": str(origin.get("text", ""))}
        found |= {
            "num_skipped": self.num_skipped, "num_scaled": self.num_scaled, "skipped_in_a_row": self.longest_row,
            "first_scale": self.first_scale, "lowest_scale": self.lowest,
        }  # fmt: skip
        if origin:
            found |= {"operation": str(origin.get("operation", "")), "key": str(origin.get("key", ""))}
        if by:
            found["made_by"] = "the scale" if by == "scale" else "the numbers themselves"
        if self.told.get("where"):
            found["first_gradient"] = str(self.told["where"])
        if self.told.get("reason"):
            found["note 1"] = str(self.told["reason"])
        return found

"""All labels are the same class.

What it finds    a classifier whose every label, in every batch, is one and the same although it has several outputs.
Why it matters   the loss falls to nothing and the model answers with that class whatever it is given.
How it knows     the labels that cross entropy (or binary cross entropy) was computed from, in the steps that were looked at,
                 over at least one pass through the data.
Known problems   a contrastive loss whose right answer is always column 0 (K90, K95), or a query whose right document comes first, compares
                 samples, not classes. What is trained to please a frozen classifier (an adversarial patch, a generator, K96) has one
                 label on purpose. So only those labels are judged whose columns are made by weights that are being trained, in the
                 last layer of the model's own output.
                 Sorted data show one class for a while: see no-shuffle.
Fix              follow the labels from their file to the loss: a tensor that is overwritten, a wrong column, a broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.batches import Loader, labels_of
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources

ENOUGH = 8  # batches that were looked at
A_PASS = 30  # steps, where it is not known how many make one pass through the data
FEWEST_LABELS = 64  # in all of them: a rare class may miss in a few small batches


@dataclass(slots=True)
class LabelConstant:
    name: ClassVar[str] = "label-constant"
    explains: ClassVar[tuple[str, ...]] = ("loss-plateau", "vanishing-gradient", "dead-relu", "unchanged-parameter", "exploding-gradient")

    sources: Sources = field(default_factory=Sources)
    loader: Loader = field(default_factory=Loader)
    trains_a_model: bool = True
    is_learnt: bool = True
    values: set[int] = field(default_factory=set)  # at most two: then they differ
    num: int = 0
    num_labels: int = 0
    num_classes: int = 0
    first_step: int = -1
    last_step: int = -1

    def see(self, step: Step) -> None:
        self.sources.see(step)
        self.loader.see(step)
        for event in step.events:
            if event.kind == "membership":
                held = event.data.get("optimizers")
                owned = [row.get("num_owned", 0) for row in held if isinstance(row, dict)] if isinstance(held, list) else []
                self.trains_a_model = not owned or any(owned)
        labels = labels_of(step)
        if labels is None or labels.num_classes < 2:
            return
        self.num += 1
        self.is_learnt = self.is_learnt and labels.is_learnt
        self.num_labels += labels.num
        self.num_classes = max(self.num_classes, labels.num_classes)
        if len(self.values) < 2:
            self.values.update(value for value, _ in labels.counts[:2])
        self.first_step = step.number if self.num == 1 else self.first_step
        self.last_step = step.number

    def answer(self) -> Answer:
        if not self.num:
            return NotEvaluated("no class labels were seen: no observed step ended in a cross entropy of a model's output")
        if len(self.values) > 1:
            return Clear()
        if not self.trains_a_model:
            return NotEvaluated("no parameter of a watched model is trained")
        if not self.is_learnt:
            return NotEvaluated("all labels are the same, but the columns of these scores are not made by weights that are trained")
        if self.num < ENOUGH or self.num_labels < FEWEST_LABELS:
            return NotEvaluated(f"only {self.num} batches with {self.num_labels} labels were looked at")
        if self.last_step - self.first_step < (self.loader.num_batches or A_PASS):
            return NotEvaluated("the training has not been through its data once")
        value = next(iter(self.values))
        return [
            Finding(
                rule=self.name,
                severity=Severity.CRITICAL,
                where="",
                step=self.first_step,
                cause=f"all {self.num_labels} labels of the {self.num} batches that were looked at are {value}, in a model with "
                f"{self.num_classes} classes{self.sources.at('backward')}",
                fix="print the labels right before the loss, and go back to the line after which they are all the same",
                evidence={
                    "label": value, "num_labels": self.num_labels, "num_looked_at": self.num, "num_classes": self.num_classes,
                    **self.sources.evidence("backward"),
                },
            )
        ]  # fmt: skip

"""The model trains while it is in evaluation mode.

What it finds    updates from forwards with model.training == False: model.train() is not called, or not again after
                 validation.
Why it matters   dropout does nothing and batch norm neither normalises by the batch nor learns its statistics:
                 another model is trained than was meant.
How it knows     every forward with gradients of a step had its root model in eval mode and so all of its dropout and
                 batch norm modules, an optimizer step followed, and that went on for a long row of steps.
Known problems   batch norm frozen by bn.eval() inside train() (K43) leaves the root in training mode. A model without
                 dropout and batch norm does not care. A teacher in eval mode beside a student in training mode is one
                 of two roots, not all. Fine-tuning a whole model in eval mode on purpose looks the same; hence a
                 warning. Dropout kept on for evaluation (K42) happens without gradients and without updates.
Fix              call model.train() at the start of each epoch, after validation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.activity import count
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources

PATIENCE = 10  # updates in a row: an epoch of a tiny dataset, not a single step taken for a sanity check


@dataclass(slots=True)
class TrainInEvalMode:
    name: ClassVar[str] = "train-in-eval-mode"
    explains: ClassVar[tuple[str, ...]] = ()

    sources: Sources = field(default_factory=Sources)
    num_updates: int = 0
    num_in_eval: int = 0
    in_a_row: int = 0
    row_step: int = -1
    step: int = -1
    mode_modules: int = 0
    eval_forwards: int = 0

    def see(self, step: Step) -> None:
        self.sources.see(step)
        self.eval_forwards += count(step, "eval_forwards")
        forwards, modules = count(step, "forwards"), count(step, "mode_modules")
        self.mode_modules = max(self.mode_modules, modules)
        if not forwards or not count(step, "optimizer_steps") or not count(step, "backwards"):
            return
        self.num_updates += 1
        # The modules are counted on observed steps alone; on the others the mode of the root must do.
        if count(step, "root_in_eval") >= forwards and count(step, "mode_modules_in_eval") >= modules:
            self.num_in_eval += 1
            self.in_a_row += 1
            if self.in_a_row == 1:
                self.row_step = step.number
            if self.in_a_row >= PATIENCE and self.step < 0:
                self.step = self.row_step
        else:
            self.in_a_row = 0

    def answer(self) -> Answer:
        if self.num_updates < PATIENCE:
            return NotEvaluated(f"only {self.num_updates} updates followed a forward of a watched model")
        if self.step < 0 or not self.mode_modules:
            return Clear()
        after = " since the validation before it" if self.eval_forwards and self.num_in_eval < self.num_updates else ""
        return [
            Finding(
                rule=self.name,
                severity=Severity.WARNING,
                where="",
                step=self.step,
                cause=f"{self.num_in_eval} of {self.num_updates} updates came from forwards in eval mode{after}, with "
                f"{self.mode_modules} dropout or batch norm modules switched off{self.sources.at('forward')}",
                fix="call model.train() before the training loop, and again after each validation",
                evidence={
                    "updates_in_eval": self.num_in_eval,
                    "updates": self.num_updates,
                    "mode_modules": self.mode_modules,
                    "eval_forwards": self.eval_forwards,
                    **self.sources.evidence("forward"),
                },
            )
        ]

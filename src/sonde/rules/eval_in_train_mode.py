"""The model is evaluated while it is in training mode.

What it finds    validation (forwards without gradients) with model.training == True: model.eval() is not called, or
                 undone too early.
Why it matters   dropout switches off units of the very model that is judged, and batch norm normalises by the batch of the
                 moment and learns its statistics from the validation data: the metrics are of another model, usually a
                 worse one, and change from call to call.
How it knows     between updates, a model that is being trained was run without gradients while it and dropout or batch norm
                 in it were in training mode: on several batches, or on the same data each time, and in most of such
                 pauses of the run.
Known problems   one input again and again is a sample of a random network (Monte-Carlo dropout, K42, K92) and is left alone; so
                 are batch norms that average over all batches (momentum=None: their statistics are computed anew, as
                 torch.optim.swa_utils.update_bn does), teachers that are never trained (mean teacher, BYOL), and what is
                 run without gradients in every step on ever new data (a GAN's generator, pseudo-labels, rollouts). A
                 single forward, such as drawing a few samples, is only mentioned, and so is batch norm alone in one of
                 several models that are trained. Validation with gradients on looks like training and is not seen.
Fix              call model.eval() before validation and model.train() after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sonde.events import Finding, Severity, Step
from sonde.rules.activity import count
from sonde.rules.rule import Answer, Clear, NotEvaluated
from sonde.rules.source import Sources
from sonde.rules.words import amount

MOST = 0.5  # of the pauses: who validates in eval mode too, and more often, knows what the mode is for
EVERY_STEP = 0.5  # pauses per update: what happens so often belongs to the step
SAMPLES_AGAIN = 3  # forwards of one and the same input in a pause: sampling on purpose
MAX_INPUTS = 64  # contents that are remembered


@dataclass(slots=True)
class _Model:
    step: int = -1  # of the first pause that may be a validation
    num_forwards: int = 0  # in it
    num_dropout: int = 0
    num_batch_norm: int = 0
    num_pauses: int = 0
    num_validations: int = 0  # pauses that are validations beyond doubt, of those that were looked into
    inputs: set[float] = field(default_factory=set)
    line: str = ""  # of that first pause
    text: str = ""


@dataclass(slots=True)
class EvalInTrainMode:
    name: ClassVar[str] = "eval-in-train-mode"
    explains: ClassVar[tuple[str, ...]] = ()

    sources: Sources = field(default_factory=Sources)
    models: dict[str, _Model] = field(default_factory=dict)
    num_models: int = 0
    num_updates: int = 0
    num_pauses: int = 0  # with any forward without gradients, before the last update
    eval_forwards: int = 0

    def see(self, step: Step) -> None:
        self.sources.see(step)
        self.num_updates += count(step, "optimizer_steps") > 0
        self.num_pauses += count(step, "eval_forwards") > 0
        self.eval_forwards += count(step, "eval_forwards")
        for event in step.events:
            if event.kind == "evaluated_in_training":
                self._see_pause(event.data)

    def _see_pause(self, data: Mapping[str, Any]) -> None:
        model = self.models.setdefault(str(data.get("model", "")), _Model())
        model.num_pauses = max(model.num_pauses, int(amount(data, "num_pauses")))
        self.num_models = max(self.num_models, int(amount(data, "num_models")))
        dropout, batch_norm = int(amount(data, "num_dropout")), int(amount(data, "num_batch_norm"))
        forwards, inputs, first = int(amount(data, "num_forwards")), int(amount(data, "num_inputs")), amount(data, "input")
        if not dropout + batch_norm or data.get("cumulative") or (inputs == 1 and forwards >= SAMPLES_AGAIN):
            return
        # The same data each time is a validation set in one batch; with several models it may be the noise that a GAN draws samples of.
        again = first in model.inputs and self.num_models == 1
        if inputs > 1 or again:
            model.num_validations += 1
        if model.step < 0:
            model.step, model.num_forwards = int(amount(data, "at")), forwards
            model.num_dropout, model.num_batch_norm = dropout, batch_norm
            model.line, model.text = str(data.get("line", "")), str(data.get("text", ""))
        if len(model.inputs) < MAX_INPUTS:
            model.inputs.add(first)

    def answer(self) -> Answer:
        if not self.num_updates:
            return NotEvaluated("no update was seen")
        if not self.eval_forwards and not self.models:
            return NotEvaluated("no forward without gradients was seen")
        found = [self._finding(name, model) for name, model in self.models.items() if self._is_validation(model)]
        return found or Clear()

    def _is_validation(self, model: _Model) -> bool:
        if model.step < 0 or model.num_pauses <= MOST * self.num_pauses:
            return False
        if model.num_pauses > EVERY_STEP * self.num_updates:
            # Ever new data in every step belongs to it; the same data is a validation after each of a few large updates.
            return len(model.inputs) <= 2 and model.num_validations > 0 and self.num_models == 1
        return True

    def _finding(self, name: str, model: _Model) -> Finding:
        parts = [f"{num} {what}" for num, what in ((model.num_dropout, "dropout"), (model.num_batch_norm, "batch norm")) if num]
        active = f"{' and '.join(parts)} module{'s' * (model.num_dropout + model.num_batch_norm != 1)}"
        # Others may run without gradients too, in eval mode: what is noted of this pause comes first.
        at = f" at {model.line}" if model.line else self.sources.at("eval_forward")
        where = {"source": model.line, "source_text": model.text} if model.line else self.sources.evidence("eval_forward")
        # Two models that train each other: pictures are drawn of a generator in training mode, and nobody measures it.
        certain = model.num_validations > 0 and (self.num_models == 1 or model.num_dropout > 0)
        times = f"{model.num_pauses} times" if model.num_pauses > 1 else "once"
        return Finding(
            rule=self.name,
            severity=Severity.WARNING if certain else Severity.INFO,
            where=name,
            step=model.step,
            cause=f"the model was run without gradients in training mode, {times}, with {active} active{at}",
            fix="call model.eval() before validation, and model.train() before the training goes on",
            evidence={
                "pauses_in_training_mode": model.num_pauses,
                "pauses": max(self.num_pauses, model.num_pauses),
                "forwards_in_the_first": model.num_forwards,
                "dropout": model.num_dropout,
                "batch_norm": model.num_batch_norm,
                **where,
            },
        )

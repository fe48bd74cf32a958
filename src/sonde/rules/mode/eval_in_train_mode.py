"""The model is evaluated while it is in training mode.

What it finds    validation (forwards without gradients) with model.training == True: model.eval() is not called, or undone too early.
Why it matters   dropout switches off units of the model that is measured, and batch norm uses and learns the statistics of the validation
                 data: the metrics are those of another model and change from call to call.
How it knows     between updates, a model in training was run without gradients while dropout or batch norm in it were in training mode: on
                 several batches, or on the same data each time, and in most of such pauses.
Known problems   not reported: one input again and again (Monte-Carlo dropout), batch norm with momentum=None (update_bn), teachers that are
                 never trained, and forwards without gradients on new data in every step (GAN generators, pseudo-labels, rollouts). A single
                 forward, and batch norm alone in one of several models, are an info. Validation with gradients looks like training.
Fix              call model.eval() before validation and model.train() after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from sonde.events import EvaluatedInTrainMode, Finding, Severity
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.source_lines_of_calls import source_evidence

MOST = 0.5  # of the pauses: a program that validates in eval mode more often uses training mode on purpose in the others
EVERY_STEP = 0.5  # pauses per update: what happens so often belongs to the step
SAMPLES_AGAIN = 3  # forwards of one and the same input in a pause: sampling on purpose


@dataclass(frozen=True)
class ModelPauses:
    """The pauses between updates in which one model was run without gradients in training mode."""

    first: EvaluatedInTrainMode  # that may be a validation
    num: int
    num_validations: int  # pauses that are validations beyond doubt, of those that have an event
    num_inputs: int  # different first inputs


def check(view: RunView) -> Result:
    num_updates = int((view.counts("optimizer_steps") > 0).sum())
    num_pauses = int((view.counts("eval_forwards") > 0).sum())  # of every mode
    if not num_updates:
        return NotEvaluated("no update was seen")
    events = view.events(EvaluatedInTrainMode)
    if not num_pauses and not events:
        return NotEvaluated("no forward without gradients was seen")
    num_models = max((event.num_models for event in events), default=0)
    return [
        _finding(view, name, pauses, num_pauses, num_models)
        for name, pauses in _pauses_by_model(events).items()
        if _is_validation(pauses, num_pauses, num_updates, num_models)
    ] or Clear()


def _pauses_by_model(events: Sequence[EvaluatedInTrainMode]) -> dict[str, ModelPauses]:
    models_so_far = accumulate((event.num_models for event in events), max)
    by_model: dict[str, list[tuple[EvaluatedInTrainMode, int]]] = {}
    for event, num_models in zip(events, models_so_far):
        by_model.setdefault(event.model, []).append((event, num_models))
    found: dict[str, ModelPauses] = {}
    for name, pauses in by_model.items():
        candidates = [(event, num_models) for event, num_models in pauses if _may_be_validation(event)]
        inputs: set[float] = set()
        num_validations = 0
        for event, num_models in candidates:
            # The same data each time is a validation set in one batch; with several models it may be the noise that a GAN draws samples of.
            num_validations += event.num_inputs > 1 or (event.input in inputs and num_models == 1)
            inputs.add(event.input)
        if candidates:
            found[name] = ModelPauses(candidates[0][0], max(event.num_pauses for event, _ in pauses), num_validations, len(inputs))
    return found


def _may_be_validation(event: EvaluatedInTrainMode) -> bool:
    is_sampling = event.num_inputs == 1 and event.num_forwards >= SAMPLES_AGAIN
    return event.num_dropout + event.num_batch_norm > 0 and not event.is_cumulative and not is_sampling


def _is_validation(pauses: ModelPauses, num_pauses: int, num_updates: int, num_models: int) -> bool:
    if pauses.num <= MOST * num_pauses:
        return False
    if pauses.num > EVERY_STEP * num_updates:
        # New data in every step belongs to the step; the same data is a validation after each of a few large updates.
        return pauses.num_inputs <= 2 and pauses.num_validations > 0 and num_models == 1
    return True


def _finding(view: RunView, name: str, pauses: ModelPauses, num_pauses: int, num_models: int) -> Finding:
    first = pauses.first
    parts = [f"{num} {what}" for num, what in ((first.num_dropout, "dropout"), (first.num_batch_norm, "batch norm")) if num]
    active = f"{' and '.join(parts)} module{'s' * (first.num_dropout + first.num_batch_norm != 1)}"
    # The first line that evaluates may run another model, in eval mode: the line of this pause comes first.
    line = first.line or view.call_sites.line("eval_forward")
    # With two models that train each other, images are drawn from a generator in training mode without measuring it.
    is_certain = pauses.num_validations > 0 and (num_models == 1 or first.num_dropout > 0)
    times = f"{pauses.num} times" if pauses.num > 1 else "once"
    return RULE.finding(
        Severity.WARNING if is_certain else Severity.INFO,
        first.at_step,
        cause=f"the model was run without gradients in training mode, {times}, with {active} active{f' at {line}' if line else ''}",
        fix="call model.eval() before validation, and model.train() before the training goes on",
        evidence={
            "pauses_in_training_mode": pauses.num,
            "pauses": max(num_pauses, pauses.num),
            "forwards_in_the_first": first.num_forwards,
            "dropout": first.num_dropout,
            "batch_norm": first.num_batch_norm,
            **(source_evidence(line, first.text) if first.line else view.call_sites.evidence("eval_forward")),
        },
        where=name,
    )


RULE = Rule("eval-in-train-mode", check, page=__doc__, needs=("optimizer_steps",))

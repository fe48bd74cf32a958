"""All labels are the same class.

What it finds    a classifier with several outputs whose labels are one and the same class in every batch.
Why it matters   the loss falls to zero, and the model predicts that class for any input.
How it knows     the labels of the (binary) cross entropy in the inspected steps, over at least one pass through the data.
Known problems   a contrastive loss whose answer is always column 0, or a training against a frozen classifier, has one label on purpose:
                 labels count only if weights in training make the scores, in the last layer of the model. Sorted data are no-shuffle.
Fix              follow the labels from their file to the loss: a tensor that is overwritten, a wrong column, a broadcast.
"""

import numpy as np

from sonde.events import OwnershipChanged, Severity
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

ENOUGH = 8  # batches that were inspected
A_PASS = 30  # steps, if it is not known how many make one pass through the data
FEWEST_LABELS = 64  # in all of them: a rare class may be absent from a few small batches


def check(view: RunView) -> Result:
    labels = view.inspected_batches.labels
    labels = labels.where(labels.num_classes >= 2)
    num_batches, num_labels = len(labels), int(labels.num.sum())
    if not num_batches:
        return NotEvaluated("no class labels were found: no observed step ended in a cross entropy of a model's output")
    classes = np.unique(np.concatenate(labels.counts)[:, 0])
    if len(classes) > 1:
        return Clear()
    if not _is_model_trained(view):
        return NotEvaluated("no parameter of a watched model is trained")
    if not labels.is_learned.all():
        return NotEvaluated("all labels are the same, but the columns of these scores are not made by weights that are trained")
    if num_batches < ENOUGH or num_labels < FEWEST_LABELS:
        return NotEvaluated(f"only {num_batches} batches with {num_labels} labels were inspected")
    first_step, last_step = view.step_number(int(labels.rows[0])), view.step_number(int(labels.rows[-1]))
    a_pass = view.training_loader.num_batches or A_PASS
    if last_step - first_step < a_pass:
        return NotEvaluated("the training has not been through its data once")
    num_later = sum(view.step_number(row) - first_step >= a_pass for row in labels.rows.tolist())
    if view.loss_trend.failing and num_later < ENOUGH:
        # With one label the loss falls at once. Of sorted data, the few later batches may all lie in the first part of a pass.
        return NotEvaluated(f"all labels are the same, but the loss does not fall, and only {num_later} batches of later passes are known")
    label, num_classes = int(classes[0]), int(labels.num_classes.max())
    return RULE.finding(
        Severity.CRITICAL,
        first_step,
        cause=f"all {num_labels} labels of the {num_batches} batches that were inspected are {label}, in a model with {num_classes} "
        f"classes{view.call_sites.at('backward')}",
        fix="print the labels right before the loss, and go back to the line after which they are all the same",
        evidence={
            "label": label, "num_labels": num_labels, "num_looked_at": num_batches, "num_classes": num_classes,
            **view.call_sites.evidence("backward"),
        },
    )  # fmt: skip


def _is_model_trained(view: RunView) -> bool:
    """An optimizer holds parameters of a watched model; True also if nothing is known of that."""
    owned = [row.get("num_owned", 0) for event in view.events(OwnershipChanged)[-1:] for row in event.optimizers]
    return not owned or any(owned)


RULE = Rule(
    "label-constant",
    check,
    page=__doc__,
    explains=("loss-plateau", "vanishing-gradient", "dead-relu", "unchanged-parameter", "exploding-gradient"),
)

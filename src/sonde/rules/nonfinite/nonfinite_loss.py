"""The loss is NaN or Inf, and none of the known ways to get there explains it.

What it finds    a loss that becomes NaN or Inf by itself: a logarithm of zero, a division by an empty count, a root at zero, a batch whose
                 every label is ignored, bad labels.
Why it matters   with backward and an update the weights become NaN and stay so; without them, averages and early stopping go wrong.
How it knows     the loss of a step with a backward was not finite. The finding says what else was not finite by then: an output of a layer
                 (the forward made it), an earlier gradient (the backward made it), or neither (the loss itself, or the targets).
Known problems   a GradScaler that skips a step has dealt with it. Divergence and bad inputs have rules of their own and come first.
Fix              examine the place named as the first that was not finite; clamp, add an epsilon, or skip empty batches there.
"""

import numpy as np

from sonde.events import Kind, NonFinite, Severity
from sonde.formatting import number
from sonde.rules.column_helpers import last_number
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView


def check(view: RunView) -> Result:
    trend = view.loss_trend
    if not trend.num_losses:
        return NotEvaluated("no backward was seen")
    bad_step = trend.first_nonfinite_step
    if bad_step < 0:
        return Clear()
    bad_row = int(np.searchsorted(view.step_numbers, bad_step))
    step, where, what = _first_place(view, bad_row, bad_step)
    has_recovered = trend.nonfinite_in_a_row == 0 and trend.num_nonfinite <= len(trend.recent)
    went_on = f"; {trend.num_nonfinite} of {trend.num_losses} losses are not finite" if trend.num_losses > 1 else ""
    is_finite = view.losses.has_loss & ~view.losses.is_nonfinite
    return RULE.finding(
        Severity.WARNING if has_recovered else Severity.CRITICAL,
        step,
        cause=f"the loss is not finite at step {bad_step}{view.call_sites.at('backward')}: {what}{went_on}",
        fix="check the arithmetic named here for log(0), a division by zero, a root at zero or an empty batch, and guard it",
        evidence={
            "first_nonfinite_step": bad_step,
            "num_nonfinite": trend.num_nonfinite,
            "num_losses": trend.num_losses,
            "last_finite_loss": last_number(view.losses.value[:bad_row][is_finite[:bad_row]]),
            **view.call_sites.evidence("backward"),
        },
        where=where,
    )


def _first_place(view: RunView, bad_row: int, bad_step: int) -> tuple[int, str, str]:
    """The first step and place that were not finite, and what that says."""
    is_skipped = view.counts("skipped_steps") > 0
    for row, event in view.events_with_rows(NonFinite):
        if event.what == "gradient" and row < bad_row and not is_skipped[row]:
            step, name = view.step_number(row), event.where or "a parameter"
            what = f"the gradient of {name} was not finite at step {step} although the loss was, so backward or what came after it made it"
            return step, event.where, what
    outputs = _num_nonfinite_outputs(view, bad_row)
    for name, num in outputs:
        if num:
            layer = view.layer_name(name) or "the model"
            return bad_step, name, f"the output of {layer} was not finite already ({number(num)} numbers), so the forward made it"
    if not outputs:
        return bad_step, "", "the output of the model was not measured in that step"
    if view.are_layers_chosen:
        others = "another layer made it, or what is computed from the outputs, or the targets"
        return bad_step, "", f"the outputs of the layers that you chose were finite, so {others}"
    return bad_step, "", "the outputs of all layers were finite, so what is computed from them made it, or the targets"


def _num_nonfinite_outputs(view: RunView, row: int) -> list[tuple[str, float]]:
    """How many numbers in the output of each layer are NaN or Inf; empty if the step was not observed."""
    for block in view.blocks(Kind.ACTIVATION, rows=np.array([row])):
        table = block[Kind.ACTIVATION]
        nums = (table["nan"] + table["inf"])[0].tolist()
        return [(site.name, num) for site, num in zip(table.sites, nums) if site is not None]
    return []


RULE = Rule(
    "nonfinite-loss",
    check,
    page=__doc__,
    explains=("loss-plateau", "dead-relu", "vanishing-gradient", "unchanged-parameter", "exploding-gradient", "nonfinite-evaluation"),
)

"""Gradients are computed again and again, and no optimizer ever uses them.

What it finds    an optimizer was built, backward runs, but optimizer.step() is never called.
Why it matters   no parameter ever changes: nothing is learned.
How it knows     backward ran and an optimizer holds parameters of the model, but there was no optimizer step, no skipped step and no update
                 by hand.
Known problems   a GradScaler that skips its first steps has skipped steps, not missing ones. Manual updates without an optimizer count as
                 updates. Accumulation over more batches than the run has is, in effect, this defect.
Fix              call optimizer.step() after backward.
"""

from sonde.events import OwnershipChanged, Severity
from sonde.rules._shared.read_event_tables import amount
from sonde.rules.column_helpers import first_where
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

ENOUGH = 10  # backward calls: an accumulation that is cut off by the end of a short run has fewer


def check(view: RunView) -> Result:
    if not view.calls.num_optimizers:
        return NotEvaluated("no optimizer was seen")
    if view.calls.updates:
        return Clear()
    backwards = view.calls["backwards"]
    if backwards < ENOUGH:
        return NotEvaluated(f"only {backwards} backward calls were made")
    ownership = view.events(OwnershipChanged)
    if ownership and not any(amount(optimizer, "num_owned") for optimizer in ownership[-1].optimizers):
        return NotEvaluated("no optimizer holds a parameter of the model that ran")
    return RULE.finding(
        Severity.CRITICAL,
        view.step_number(first_where(view.counts("backwards") > 0) or 0),
        cause=f"backward ran {backwards} times{view.call_sites.at('backward')}, but optimizer.step() was never called",
        fix="call optimizer.step() after loss.backward()",
        evidence={
            "backwards": backwards,
            "optimizer_steps": 0,
            "zero_grads": view.calls["zero_grads"],
            **view.call_sites.evidence("backward"),
        },
    )


RULE = Rule(
    "missing-optimizer-step",
    check,
    page=__doc__,
    explains=(
        "loss-plateau", "unchanged-parameter", "vanishing-gradient", "exploding-gradient", "dead-relu", "lr-divergence",
        "train-in-eval-mode",
    ),
)  # fmt: skip

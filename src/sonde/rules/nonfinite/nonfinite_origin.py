"""The first NaN or Inf of the training, and the operation that made it.

What it finds    an operation with finite inputs whose output holds a NaN or Inf, from which the bad loss or gradient follows (log(0), an
                 empty count, an overflow, a softmax over a masked row); or a weight or batch that was bad before the step.
Why it matters   everything after it is NaN. The line that made it is rarely the line where the NaN is noticed.
How it knows     before anything uses the bad loss or gradient, the step is replayed with every operation checked, on the same inputs and
                 random numbers, and with halves of the batch to find the samples. If that finds nothing, gradients that stay bad while the
                 optimizer uses them are reported, unless the loss is bad too (nonfinite-loss).
Known problems   a step that cannot be replayed (it reads from a stream, it changes objects) is explained by the model alone or by the graph
                 of the loss; the notes say so. Masks of -Inf that do no harm are not counted. After a divergence, lr-divergence comes
                 first.
Fix              see the finding: it depends on the operation and its inputs.
"""

import numpy as np

from sonde.events import Finding, NonFinite, Severity
from sonde.rules._shared.origin_search_results import CONSEQUENCES, OPERATION_DEFECTS, OriginEvents, training_origin
from sonde.rules.column_helpers import last_streak
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

STAYED_BAD = 3  # steps in a row: one bad update makes the weights bad, and these every gradient after it; a single bad gradient does not


def check(view: RunView) -> Result:
    search = view.remember(training_origin)
    if search.origin is not None:
        has_own_rule = any(search.origin.key in keys for keys in OPERATION_DEFECTS.values())
        return Clear() if has_own_rule else search.finding(RULE.name, Severity.CRITICAL)
    if search.reason_unknown:
        return _gradients_that_stay_bad(view, search) or NotEvaluated(
            f"a number is not finite, and where it was made could not be found: {search.reason_unknown}"
        )
    return Clear() if view.calls["backwards"] else NotEvaluated("no backward was seen")


def _gradients_that_stay_bad(view: RunView, search: OriginEvents) -> Finding | None:
    """A finding without an origin if the optimizer uses bad gradients up to the last step, under a finite loss."""
    events = view.events_with_rows(NonFinite)
    if any(event.what == "loss" for _, event in events):
        return None
    places = {row: event.where for row, event in events if event.what == "gradient" and row < view.num_steps}
    is_bad = np.zeros(view.num_steps, bool)
    is_bad[list(places)] = True
    streak = last_streak(is_bad & (view.counts("skipped_steps") == 0))
    if streak is None or streak.length < STAYED_BAD:
        return None
    step, where = view.step_number(streak.start), places[streak.start]
    return RULE.finding(
        Severity.CRITICAL,
        step,
        cause=f"the gradient of {where or 'a parameter'} was not finite at step {step}, the optimizer used it, and in all "
        f"{streak.length} steps from there on gradients are bad, though the loss is finite; where it was made could not be found: "
        f"{search.reason_unknown}",
        fix="put `with sonde.find_origin():` around the forward and backward of each batch to name the operation",
        evidence={"bad_steps": streak.length, "first_bad_step": step},
        where=where,
    )


RULE = Rule("nonfinite-origin", check, page=__doc__, explains=CONSEQUENCES)

"""Validation takes a large share of the run.

What it finds    validations that are so frequent or so long that they take a large share of the run.
Why it matters   a curve with a tenth of the points shows the same; the time is better spent on training.
How it knows     the time from the first forward without gradients after a training step until the training goes on, without data loading.
Known problems   forwards without gradients in most steps, as few as training forwards (a target network, a teacher, a sampled action), are
                 no validation. A validation with gradients counts as training. One validation is no problem: two are needed.
Fix              validate less often, or on a fixed part of the data.
"""

from math import ceil

from sonde.rules._shared.profiled_steps import too_often
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView

DOMINATES = 0.4  # share of the time: a validation per epoch on a fifth of the data takes less than a tenth
FINE = 0.1  # share that is acceptable: the proposal aims at it
USUAL = 0.5  # share of steps: what happens in more of them is part of the step …
MANY = 4  # … unless so many forwards are made without gradients for each one with


def check(view: RunView) -> Result:
    times = view.times
    if reason := times.reason_not_evaluated:
        return NotEvaluated(reason)
    share = times.share("validation")
    rows = times.rows[view.steps["validation_ms"][times.rows] > 0]  # steps before which the training validated
    num = len(rows)
    forwards, eval_forwards = (int(view.counts(name)[rows].sum()) for name in ("forwards", "eval_forwards"))
    is_part_of_step = num > USUAL * times.num and eval_forwards < MANY * forwards
    if share < DOMINATES or num < 2 or is_part_of_step:
        return Clear()
    fewer = max(2, ceil(share / (FINE / (1 - FINE) * (1 - share))))
    part = "on a part of the data"
    return too_often(RULE, view, "validation", num, fewer, what="validation", verb="validate", part=part, call="eval_forward")


RULE = Rule("validation-dominates", check, page=__doc__, explains=("slow-step-outliers",))
